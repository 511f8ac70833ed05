"""Reads and writes Megatron's torch_dist checkpoints under hub names, without Megatron."""
