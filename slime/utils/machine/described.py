"""A machine that a plan describes: settings are derived for it instead of this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# The number of its GPUs, and the bytes of each if they are known.
described: ContextVar[tuple[int, int | None] | None] = ContextVar("described", default=None)


@contextmanager
def described_machine(num_gpus: int, gpu_memory: int | None) -> Iterator[None]:
    """Derive settings in this block for a machine with these GPUs. `gpu_memory`: bytes of each, if known."""
    token = described.set((num_gpus, gpu_memory))
    try:
        yield
    finally:
        described.reset(token)
