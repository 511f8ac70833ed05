"""Checkpoints of Megatron's in its format torch_dist, read and written under hub names, without Megatron."""
