"""Pickles values that hold many small tensors: torch's own way spends a tenth of a millisecond on each."""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Mapping
from typing import Any

import torch

_LAYOUT = operator.attrgetter("dtype", "ndim", "is_cpu", "requires_grad")


class _TensorPickler(pickle.Pickler):
    """Writes plain CPU tensors as numpy arrays; everything else, bfloat16 included, as usual."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
        if not plain or value.requires_grad or value.dtype is torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (value.numpy(),)


class CutRows(list[torch.Tensor]):
    """A list of tensors that were cut from one, which is known for as long as none of them is replaced."""

    def __init__(self, joined: torch.Tensor, lengths: list[int]):
        super().__init__(joined.split(lengths))
        self._cut, self._whole = tuple(self), (joined, lengths)

    def whole(self) -> tuple[torch.Tensor, list[int]] | None:
        """That tensor, and the length of each; None: others are in the list now."""
        same = len(self) == len(self._cut) and all(map(operator.is_, self, self._cut))
        return self._whole if same else None


class Rows:
    """Tensors of one dimension and one kind as a single one: each by itself takes long to be pickled.

    Example: of tensors [5, 6] and [7] this is the tensor [5, 6, 7] with lengths [2, 1].
    """

    def __init__(self, tensors: list[torch.Tensor]):
        self._joined, self._lengths = torch.cat(tensors), [tensor.numel() for tensor in tensors]

    def tensors(self) -> list[torch.Tensor]:
        return list(self._joined.split(self._lengths))


def pack_rows(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with `Rows` in place of lists that can be joined."""
    return {key: Rows(value) if _can_be_joined(value) else value for key, value in values.items()}


def unpack_rows(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tensors() if isinstance(value, Rows) else value for key, value in values.items()}


def _can_be_joined(value: Any) -> bool:
    if type(value) is not list or len(value) < 2 or set(map(type, value)) != {torch.Tensor}:
        return False
    return set(map(_LAYOUT, value)) == {(value[0].dtype, 1, True, False)}


def dumps(value: Any) -> bytes:
    """`pickle.loads` reads it back; tensors that shared memory before do not share it afterwards."""
    file = io.BytesIO()
    _TensorPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()
