"""Errors of checkpoint libraries, as errors that say what happened."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise what torch wraps in an exception that is no `Exception` and would end the process unheard."""
    # Only where a checkpoint is written or read.
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}") from cause


@contextmanager
def unreadable_named(path: Path) -> Iterator[None]:
    """Whatever a reader stumbles over in a damaged file: one error that names the file or folder."""
    try:
        with plain_errors():
            yield
    except Exception as error:  # readers of half a file raise anything: EOFError, KeyError, RuntimeError, ...
        raise ValueError(
            f"checkpoint {path} cannot be read: it is damaged or incomplete ({type(error).__name__}: "
            f"{error}); restore it, or use the one before it (--ckpt-step)."
        ) from error
