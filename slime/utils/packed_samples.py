"""Keeps the long lists of a sample as arrays: they travel between processes at the speed of a memory copy.

A packed sample is used like any other: a field becomes a list when it is first read or replaced. The experts
that an engine chose are so large that only a reference to them travels; reading the field reads their file.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.utils.stored_arrays import StoredArray, store
from slime.utils.types import Sample

_EXPERTS = "rollout_routed_experts"
PACKED = "_packed"  # the attribute with the arrays and references
_LEAST = 64  # entries; shorter lists are as fast


class _Unpacked:
    """A field that is made from its array when it is first read; the list then takes its place."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, sample: Any, owner: type | None = None) -> Any:
        if sample is None:
            return None
        array = vars(sample).get(PACKED, {}).get(self._name)
        if isinstance(array, StoredArray):
            array = array.load().astype(np.int32)
            vars(sample)[self._name] = array
            return array
        values = vars(sample)[self._name] = None if array is None else array.tolist()
        return values


class PackedSample(Sample):
    """A sample of another process. Its type annotations are those of `Sample`."""

    tokens = _Unpacked()
    loss_mask = _Unpacked()
    rollout_log_probs = _Unpacked()
    teacher_log_probs = _Unpacked()
    rollout_routed_experts = _Unpacked()

    def to_dict(self) -> dict[str, Any]:
        for name in vars(self).get(PACKED, ()):
            getattr(self, name)
        data = super().to_dict()
        data.pop(PACKED, None)
        return data

    @property
    def effective_response_length(self) -> int:
        mask = packed_array(self, "loss_mask")
        return super().effective_response_length if mask is None else int(mask.sum(dtype=np.int64))


def packed_array(sample: Sample, name: str) -> Any:
    """Return the array of a field, or the reference to it; None: the field is a list, or there is none."""
    held = vars(sample)
    array: npt.NDArray[Any] | StoredArray | None = None if name in held else held.get(PACKED, {}).get(name)
    return array


def values_of(sample: Sample, name: str) -> Any:
    """Return the values of a field as they are held, without making a list of an array."""
    array = packed_array(sample, name)
    return getattr(sample, name) if array is None else array


def pack(sample: Sample) -> None:
    """Turn a sample into a packed one, in place. Values stay as they are, to the last bit."""
    if type(sample) not in (Sample, PackedSample):  # a class of the user's own
        return
    held, packed = vars(sample), dict[str, Any]()
    for name, small in (("tokens", np.int32), ("loss_mask", np.int8)):
        _pack_field(held, packed, name, np.int64, small)
    for name in ("rollout_log_probs", "teacher_log_probs"):
        _pack_field(held, packed, name, np.float64, np.float32)
    _attach(sample, packed)


def _attach(sample: Sample, packed: dict[str, Any]) -> None:
    """Let these fields be read from their arrays."""
    if packed:
        held = vars(sample)
        for name in packed:
            held.pop(name, None)
        held[PACKED] = {**held.get(PACKED, {}), **packed}
        sample.__class__ = PackedSample


def store_experts(sample: Sample, run_dir: str) -> None:
    """Move the experts that an engine chose for a finished sample into a file of the run folder."""
    experts = vars(sample).get(_EXPERTS)
    if type(sample) in (Sample, PackedSample) and isinstance(experts, np.ndarray):
        _attach(sample, {_EXPERTS: store(experts, run_dir, str(sample.index))})


def references_in(sample: Sample) -> list[StoredArray]:
    """Return the references that a sample holds, also of arrays that somebody has read."""
    return [array for array in vars(sample).get(PACKED, {}).values() if isinstance(array, StoredArray)]


def fields_with_references(sample: Sample) -> dict[str, Any]:
    """Return `Sample.to_dict` with references where it would read their arrays; see `from_fields`."""
    reference = packed_array(sample, _EXPERTS)
    if not isinstance(reference, StoredArray):
        return sample.to_dict()
    sample = copy.copy(sample)
    setattr(sample, _EXPERTS, None)
    return {**sample.to_dict(), PACKED: {_EXPERTS: reference}}


def from_fields(fields: dict[str, Any]) -> Sample:
    """Invert `fields_with_references`; also fields as a sample holds them. LookupError: an array is lost."""
    fields = dict(fields)
    packed = fields.pop(PACKED, {})
    if lost := [a.path for a in packed.values() if isinstance(a, StoredArray) and not a.is_there()]:
        raise LookupError(f"{lost[0]} is lost")
    sample = Sample.from_dict(fields)
    _attach(sample, packed)
    return sample


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
