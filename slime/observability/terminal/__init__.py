"""Output on a terminal: live lines, progress, and capture of everything else."""
