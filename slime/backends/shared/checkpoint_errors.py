"""Turns errors of checkpoint libraries into clear ones, and refuses checkpoints that contain code."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from slime.utils.files.pickled_names import foreign_name

_METADATA = ".metadata"  # of torch's distributed checkpoints, a pickle
_SAFE_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # read by torch.load at every call
_PARTS = "torch.distributed.checkpoint."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ENUMERATIONS = frozenset(
    {(f"{_PARTS}metadata", "_MEM_FORMAT_ENCODING"), (f"{_PARTS}planner", "WriteItemType")}
)
# Classes of the metadata of checkpoints; creating one has no side effects.
_NAMES_OF_METADATA = frozenset(
    {
        *((f"{_PARTS}metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *((f"{_PARTS}metadata", name) for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
        *((f"{_PARTS}metadata", name) for name in ("ChunkStorageMetadata", "TensorProperties")),
        *_ENUMERATIONS,
        (f"{_PARTS}filesystem", "_StorageInfo"),
        *((f"{_PARTS}planner", name) for name in ("SavePlan", "WriteItem")),
        *((f"{_PARTS}planner", name) for name in ("TensorWriteData", "BytesIOWriteData")),
        *((_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name in ("Size", "float64", "float32", "float16", "bfloat16", "bool")),
        *(("torch", name) for name in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")),
        *(("torch", name) for name in ("float8_e4m3fn", "float8_e5m2", "uint64", "device")),
        *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
        ("pathlib._local", "PosixPath"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
    }
)


class CodeInCheckpoint(ValueError):
    """A checkpoint whose files would run code when they are read."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Unwrap errors that torch raises as a `BaseException`, which would end the process silently."""
    # Only where a checkpoint is written or read.
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}") from cause


@contextmanager
def unreadable_named(path: Path) -> Iterator[None]:
    """Turn any error of a reader in a damaged file into one that names the file or folder.

    No code in the folder is run: its metadata may contain torch's own classes, and the rest plain values.
    """
    try:
        # Libraries that let torch run code from files get plain values, or an error.
        with plain_errors(), mock.patch.dict(os.environ, {_SAFE_ONLY: "1"}):
            _refuse_code(path / _METADATA)
            yield
    except CodeInCheckpoint:
        raise
    except Exception as error:  # readers of half a file raise anything: EOFError, KeyError, RuntimeError, ...
        raise ValueError(
            f"checkpoint {path} cannot be read: it is damaged or incomplete ({type(error).__name__}: "
            f"{error}); restore it, or use the one before it (--ckpt-step)."
        ) from error


def _refuse_code(metadata: Path) -> None:
    if metadata.is_file() and (
        name := foreign_name(metadata.read_bytes(), _NAMES_OF_METADATA, _ENUMERATIONS)
    ):
        raise CodeInCheckpoint(
            f"checkpoint {metadata.parent} is refused: {_METADATA} would run {name}, which no checkpoint of "
            "slime's does; use one from a source that you trust."
        )
