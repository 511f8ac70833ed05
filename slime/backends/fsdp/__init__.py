"""Trains HF causal LMs with FSDP2, on one process or many, on CPU or GPU."""

from slime.backends.fsdp.backend import FSDPBackend

__all__ = ["FSDPBackend", "create_backend"]

create_backend = FSDPBackend.create
