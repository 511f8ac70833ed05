"""SGLang's format of a bucket of weights: a pickled dictionary of a flat tensor and its layout.

SGLang is not imported: its metadata class is named in the pickle, and only SGLang's side needs to know it. A
tensor on a CUDA device goes as a handle to its memory, which a process on the same device maps; one on the
CPU goes as bytes.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime.wire.manifest import DTYPES, TensorEntry


@dataclass(frozen=True)
class _Global:
    """Refers to a global that is resolved when the pickle is read."""

    module: str
    name: str

    def __call__(self) -> None:
        raise TypeError(f"{self.module}.{self.name} exists only in SGLang")


_METADATA = _Global("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
_REBUILD_CUDA = _Global("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
_DEVICE_ARGUMENT = 6  # argument of rebuild_cuda_tensor: the number of the device


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Location of one weight, with the fields of SGLang's own metadata class."""

    entry: TensorEntry

    @property
    def arguments(self) -> tuple[Any, ...]:
        entry = self.entry
        start, end = entry.offset, entry.offset + entry.nbytes
        return entry.name, torch.Size(entry.shape), DTYPES[entry.dtype], start, end, entry.nbytes


class _Pickler(pickle._Pickler):
    """The pickler in Python, which lets us write a name without importing what it names.

    Large byte strings are written whole, so its speed does not matter.
    """

    write: Callable[[bytes], object]  # set by the base class

    def __init__(self, file: io.BytesIO, reader_device: int):
        super().__init__(file, protocol=4)
        self._reader_device = reader_device

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, _Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            return
        super().save(obj, save_persistent_id)  # type: ignore[misc]  # exists in Python's own pickler

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Metadata):
            return _METADATA, obj.arguments
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            # Only needed with CUDA.
            from torch.multiprocessing.reductions import reduce_tensor

            _, arguments = reduce_tensor(obj)
            return _REBUILD_CUDA, seen_by_reader(arguments, self._reader_device)
        return NotImplemented


def seen_by_reader(arguments: tuple[Any, ...], reader_device: int) -> tuple[Any, ...]:
    """Return a handle with the device's number as the engine counts it; here every device is number 0."""
    return (*arguments[:_DEVICE_ARGUMENT], reader_device, *arguments[_DEVICE_ARGUMENT + 1 :])


def pack_bucket(flat: torch.Tensor, entries: Sequence[TensorEntry], *, reader_device: int = 0) -> str:
    """Return a bucket as base64 text: `flat` is a uint8 tensor that holds the weights at the places in
    `entries`. It may be read once, because each handle to device memory counts a single reader.
    """
    buffer = io.BytesIO()
    content = {"flattened_tensor": flat, "metadata": [_Metadata(entry) for entry in entries]}
    _Pickler(buffer, reader_device).dump(content)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")
