"""HF causal LMs trained under FSDP2, on one process or many, CPU or GPU."""

from slime.backends.fsdp.backend import FSDPBackend

__all__ = ["FSDPBackend", "create_backend"]

create_backend = FSDPBackend.create
