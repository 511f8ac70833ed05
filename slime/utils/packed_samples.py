"""Keeps the long lists of a sample as arrays: they travel between processes at the speed of a memory copy.

A packed sample is used like any other: a field becomes a list when it is first read or replaced.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slime.utils.types import Sample

_PACKED = "_packed"  # the attribute with the arrays
_LEAST = 64  # entries; shorter lists are as fast


class _Unpacked:
    """A field that is made from its array when it is first read; the list then takes its place."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, sample: Any, owner: type | None = None) -> Any:
        if sample is None:
            return None
        array = vars(sample).get(_PACKED, {}).get(self._name)
        values = vars(sample)[self._name] = None if array is None else array.tolist()
        return values


class PackedSample(Sample):
    """A sample of another process. Its type annotations are those of `Sample`."""

    tokens = _Unpacked()
    loss_mask = _Unpacked()
    rollout_log_probs = _Unpacked()
    teacher_log_probs = _Unpacked()

    def to_dict(self) -> dict[str, Any]:
        for name in vars(self).get(_PACKED, ()):
            getattr(self, name)
        data = super().to_dict()
        data.pop(_PACKED, None)
        return data

    @property
    def effective_response_length(self) -> int:
        mask = packed_array(self, "loss_mask")
        return super().effective_response_length if mask is None else int(mask.sum(dtype=np.int64))


def packed_array(sample: Sample, name: str) -> npt.NDArray[Any] | None:
    """Return the array of a field; None: the field is a list, or there is none."""
    held = vars(sample)
    array: npt.NDArray[Any] | None = None if name in held else held.get(_PACKED, {}).get(name)
    return array


def values_of(sample: Sample, name: str) -> Any:
    """Return the values of a field as they are held, without making a list of an array."""
    array = packed_array(sample, name)
    return getattr(sample, name) if array is None else array


def pack(sample: Sample) -> None:
    """Turn a sample into a packed one, in place. Values stay as they are, to the last bit."""
    if type(sample) is not Sample:  # a class of the user's own
        return
    held, packed = vars(sample), dict[str, npt.NDArray[Any]]()
    for name, small in (("tokens", np.int32), ("loss_mask", np.int8)):
        _pack_field(held, packed, name, np.int64, small)
    for name in ("rollout_log_probs", "teacher_log_probs"):
        _pack_field(held, packed, name, np.float64, np.float32)
    if packed:
        held[_PACKED] = packed
        sample.__class__ = PackedSample


def _pack_field(held: dict[str, Any], packed: dict[str, Any], name: str, full: Any, small: Any) -> None:
    values = held.get(name)
    if type(values) is not list or len(values) < _LEAST:
        return
    try:
        array = np.array(values)
    except (ValueError, OverflowError):  # what a generate function put there is checked by the driver
        return
    if array.dtype != full or array.ndim != 1:
        return
    with np.errstate(over="ignore"):
        shrunk = array.astype(small)
    packed[name] = (
        shrunk if np.array_equal(shrunk.astype(full), array, equal_nan=full is np.float64) else array
    )
    del held[name]
