"""The trainer's processes: one rank, all ranks as one trainer, and what they send."""
