"""Flags of other programs that are passed on: SGLang, its router, and megatron-core."""
