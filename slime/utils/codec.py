"""Encodes plain values as bytes and decodes them with the same types, without ever running code.

Every process of a run uses this format: the record on the disk, the batches on their way to the trainer ranks
and the state of the data source in a checkpoint. It is msgpack with a few types added: tuples, sets, large
integers, numpy arrays and scalars, and torch tensors.

    None, bool, int, float, str, bytes, list, dict   as msgpack has them; text may hold lone surrogates
    tuple, set, numpy scalar            a map with one entry, whose key says which of them it is
    numpy array, torch tensor           one buffer: type and shape as text, then the raw values
    TensorRows                          one tensor and the length of each row; comes back as a list
    StoredArray                         the reference: the array stays in its file

Equal values give equal bytes. Arrays and tensors come back in memory of their own, so they may be changed.
Values that contain themselves, or are nested more than about 500 levels deep, are not supported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from slime.utils.stored_arrays import StoredArray

_BIG_INT, _ARRAY, _TENSOR, _STORED = 1, 2, 3, 4  # msgpack's extension types that hold bytes
_TUPLE, _SET, _SCALAR, _ROWS = 11, 12, 14, 15  # without bytes: the keys of those maps
_MAX_BUFFER = (1 << 32) - 1024  # msgpack counts the bytes of a buffer in 32 bits


class CodecError(ValueError):
    """A value cannot be encoded, or bytes cannot be decoded."""


class ForeignValue(CodecError):
    """The value contains something that the codec does not store. The message names it and its place.

    Example: a Thing at ['metadata'][3]
    """


class TensorRows(list[Any]):
    """1-D tensors of one dtype that are written as one buffer, 20 times faster than one by one.

    Example: the rows [5, 6] and [7] are written as the tensor [5, 6, 7] with the lengths [2, 1].
    """


def with_rows(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with `TensorRows` in place of every list that can be one."""
    return {key: TensorRows(value) if _are_rows(value) else value for key, value in batch.items()}


class _Marker:
    """The decoded key of a map that represents a tuple, a set, a numpy scalar, ..."""

    def __init__(self, code: int):
        self.code = code


def _key(code: int) -> Any:
    return msgpack.ExtType(code, b"")


def encode(value: Any) -> bytes:
    """Return the bytes of a plain value. ForeignValue: it contains something else, or is too deep."""
    try:
        packed: bytes = msgpack.packb(
            value, default=_added_type, strict_types=True, unicode_errors="surrogatepass"
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        try:
            found = _find_foreign(value)
        except RecursionError:
            found = "a value that contains itself or is nested too deeply"
        raise ForeignValue(found or f"a value that is {error}") from None
    return packed


def decode(data: bytes | memoryview) -> Any:
    """Return the value that `encode` wrote. CodecError: these bytes are damaged, incomplete or foreign."""
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=False,
            ext_hook=_decode_extension,
            object_pairs_hook=_decode_map,
            unicode_errors="surrogatepass",
        )
    except Exception as error:  # msgpack, numpy and torch raise anything for bytes that they did not write
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CodecError(f"these bytes are damaged, or not written by slime ({reason})") from error


# -- writing


def _added_type(value: Any) -> Any:
    """Express a value of an added type in msgpack's types. TypeError: the codec does not store it."""
    kind = type(value)
    if kind is tuple:
        return {_key(_TUPLE): list(value)}
    if kind is int:
        return msgpack.ExtType(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if kind is set:
        return {_key(_SET): sorted(value, key=encode)}
    if kind is np.ndarray:
        return _encode_array(value)
    if kind is StoredArray:
        reference = [value.path, value.dtype, list(value.shape), value.checksum]
        return msgpack.ExtType(_STORED, msgpack.packb(reference))
    if kind is TensorRows:
        return {_key(_ROWS): [[row.numel() for row in value], sys.modules["torch"].cat(list(value))]}
    if isinstance(value, np.generic):
        return {_key(_SCALAR): _encode_array(np.asarray(value))}
    if _is_tensor(value):
        return _encode_tensor(value)
    raise TypeError(f"a {kind.__qualname__}")


def _encode_array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise TypeError(f"an array of {array.dtype}")
    return _buffer(_ARRAY, _header(array.dtype.str, array.shape), array.tobytes())


def _encode_tensor(tensor: Any) -> Any:
    header = _header(str(tensor.dtype)[6:], tuple(tensor.shape))
    flat = tensor.detach().cpu().contiguous()
    try:
        array = flat.numpy()
    except TypeError:  # numpy has no bfloat16 and no 8-bit floats
        array = flat.reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return _buffer(_TENSOR, header, array.tobytes())


def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    return f"{dtype} {' '.join(map(str, shape))}\n".encode()


def _buffer(code: int, header: bytes, values: bytes) -> Any:
    if len(values) > _MAX_BUFFER:
        raise TypeError("an array or tensor of more than 4 GiB")
    return msgpack.ExtType(code, header + values)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # without torch there are no tensors
    return torch is not None and type(value) is torch.Tensor and value.layout is torch.strided


def _are_rows(value: Any) -> bool:
    if type(value) is not list or len(value) < 2 or not all(map(_is_tensor, value)):
        return False
    return {(row.dtype, row.ndim, row.is_cpu) for row in value} == {(value[0].dtype, 1, True)}


def _find_foreign(value: Any, place: str = "") -> str | None:
    """Return the name and the place of the first value that cannot be stored; None: there is none."""
    kind = type(value)
    if kind in (list, tuple, set, dict):
        entries = value.items() if kind is dict else enumerate(value)
        for key, item in entries:
            if kind is dict and (found := _find_foreign(key, f"{place}[key {key!r:.60}]")):
                return found
            if found := _find_foreign(item, f"{place}[{key!r:.60}]"):
                return found
    elif kind not in (type(None), bool, int, float, str, bytes):
        try:
            _added_type(value)
        except TypeError as error:
            return f"{error} at {place or 'the top'}"
    return None


# -- reading


def _decode_extension(code: int, data: bytes) -> Any:
    if code in (_TUPLE, _SET, _SCALAR, _ROWS) and not data:
        return _Marker(code)
    if code == _BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _STORED:
        path, kind, sizes, checksum = msgpack.unpackb(data)
        return StoredArray(path, kind, tuple(sizes), checksum)
    end = data.index(b"\n") + 1
    dtype, *numbers = data[:end].decode().split()
    shape = tuple(map(int, numbers))
    values = memoryview(data)[end:]
    if code == _ARRAY:
        found = np.dtype(dtype)
        if found.hasobject:
            raise ValueError("an array of objects")
        return np.frombuffer(values, found).reshape(shape).copy()
    if code == _TENSOR:
        return _decode_tensor(dtype, shape, values)
    raise ValueError(f"unknown type {code}")


def _decode_tensor(dtype: str, shape: tuple[int, ...], values: memoryview) -> Any:
    import torch  # only values with tensors need it, and it takes seconds to load

    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype) or len(values) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"no tensor of {dtype} and {shape}")
    own = bytearray(values)
    return torch.frombuffer(own, dtype=kind).reshape(shape) if own else torch.empty(shape, dtype=kind)


def _decode_map(pairs: list[tuple[Any, Any]]) -> Any:
    if len(pairs) == 1 and type(pairs[0][0]) is _Marker:
        [(marker, value)] = pairs
        if marker.code == _TUPLE:
            return tuple(value)
        if marker.code == _SET:
            return set(value)
        if marker.code == _ROWS:
            lengths, joined = value
            return list(joined.split(lengths))
        return value[()]
    return dict(pairs)
