"""The trainer's processes: a single rank, the group of all ranks, and the sender of weights."""
