"""Files of runs and checkpoints: written whole, locked, checksummed, and read without running code."""
