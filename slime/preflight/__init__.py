"""What can be known before any process starts: what is wrong, and what a run will cost. Begin with
all_checks.py."""
