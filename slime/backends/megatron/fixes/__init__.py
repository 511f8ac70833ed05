"""Patches for megatron-core 0.16.1: bug fixes, and support for CPUs and for no TransformerEngine."""
