"""Plain values (numbers, text, lists, dicts, arrays, tensors) as bytes and back, exactly and without code.

Long lists of numbers, which samples are made of, take as many bytes per number as the largest needs; floats
four where that loses nothing. What a dict holds beside lists and dicts is one piece of JSON, which is written
many times faster than value by value. Anything else than plain values is a `ForeignValue`, which says where
it is.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import struct
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from slime.record.packed import pack_numbers
from slime.record.tables import pack_table, unpack_table

_SHORT = 4  # lists below this many entries are written entry by entry
_WIDTHS = ("<i1", "<i2", "<i4", "<i8")
_RANGES = [(int(np.iinfo(width).min), int(np.iinfo(width).max)) for width in _WIDTHS]
_CODES = "bhiq"  # the same widths, as `array` names them
_LONG = 64  # from so many entries on numpy, which takes a while to begin, is the faster
_SCALARS = frozenset({type(None), bool, int, float, str})  # what JSON gives back as it was
_LAYOUT = operator.attrgetter("dtype", "ndim", "is_cpu")
_as_json = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode


class ForeignValue(ValueError):
    """A value that is not plain, and where it is."""


class TensorRows(NamedTuple):
    """Tensors of one dimension by the one they were cut from, and the length of each; read as their list."""

    joined: Any
    lengths: list[int]


def dumps(value: Any) -> bytes:
    """Example: dumps([7, 8, 2, 9]) holds one byte per number; `loads` gives the same list back."""
    out = bytearray()
    _write(out, value, "")
    return bytes(out)


def loads(data: bytes) -> Any:
    """Inverse of `dumps`. ValueError: these bytes were not written by it, or not all of them are there."""
    try:
        value, end = _read(memoryview(data), 0)
    except Exception as error:  # numpy and torch raise anything for a shape or type that is none
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"these are not the bytes of a plain value ({said})") from error
    if end != len(data):
        raise ValueError("these are not the bytes of a plain value (there are too many)")
    return value


# -- writing


def _write(out: bytearray, value: Any, where: str) -> None:
    writer = _WRITERS.get(type(value))
    if writer is not None:
        writer(out, value, where)
    elif isinstance(value, np.generic):
        _head(out, b"G", _text(value.dtype.str), _blob(value.tobytes()))
    elif _is_tensor(value):
        _write_tensor(out, value)
    else:
        raise ForeignValue(f"a {type(value).__qualname__} at {where or 'its top'}")


def _write_int(out: bytearray, value: int, where: str) -> None:
    if -(1 << 63) <= value < 1 << 63:
        out += b"I" + struct.pack("<q", value)
    else:
        _head(out, b"J", _text(str(value)))


def _write_list(out: bytearray, value: list[Any], where: str) -> None:
    kinds = set(map(type, value)) if len(value) >= _SHORT else set()
    if kinds == {int} and (packed := _pack_narrow(value)) is not None:
        _head(out, b"i", bytes([packed[0]]), _blob(packed[1]))
        return
    if kinds == {float}:
        _write_floats(out, value)
        return
    if kinds == {dict} and (table := pack_table(value)) is not None:
        _head(out, b"t", _blob(table))
        return
    if len(kinds) == 1 and _is_tensor(value[0]) and _are_rows(value):
        _write_rows(out, value)
        return
    if (groups := _pack_groups(value)) is not None:
        _head(out, b"g", *groups)
        return
    _write_entries(out, b"L", value, where)


def _pack_groups(value: list[Any]) -> tuple[bytes, bytes] | None:
    """Lists of dicts that all have the same names, as groups of samples are: lengths, and one table of all.

    None: it is something else. A table for each takes twice as long.
    """
    first = value[0] if value else None
    if not (type(first) is list and first and type(first[0]) is dict):
        return None
    if set(map(type, value)) != {list}:
        return None
    rows = list(itertools.chain.from_iterable(value))
    table = pack_table(rows) if set(map(type, rows)) == {dict} else None
    return None if table is None else (_blob(pack_numbers("I", list(map(len, value)))), _blob(table))


def _pack_narrow(value: list[int]) -> tuple[int, bytes] | None:
    """In the first of the widths that holds all: to try is faster than to look for the largest."""
    for width, code in enumerate(_CODES):
        try:
            return width, pack_numbers(code, value)
        except struct.error:
            continue
    return None


def _write_floats(out: bytearray, value: list[float]) -> None:
    if len(value) < _LONG:
        whole, half = pack_numbers("d", value), array("f", value)
        exact = pack_numbers("d", half) == whole
        _head(out, b"f", bytes([4 if exact else 8]), _blob(pack_numbers("f", half) if exact else whole))
        return
    whole = pack_numbers("d", value)  # numpy takes longer to read a list
    with np.errstate(over="ignore"):
        singles = np.frombuffer(whole, "<f8").astype("<f4")
    exact = singles.astype("<f8").tobytes() == whole
    _head(out, b"f", bytes([4 if exact else 8]), _blob(singles.tobytes() if exact else whole))


def _write_entries(out: bytearray, tag: bytes, value: Any, where: str) -> None:
    _head(out, tag, _length(len(value)))
    for number, item in enumerate(value):
        _write(out, item, f"{where}[{number}]")


def _write_dict(out: bytearray, value: dict[Any, Any], where: str) -> None:
    if set(map(type, value)) == {str} and _write_object(out, value, where):
        return
    _head(out, b"M", _length(len(value)))
    for key, item in value.items():
        _write(out, key, f"{where}[key {key!r}]")
        _write(out, item, f"{where}[{key!r}]")


def _write_object(out: bytearray, value: dict[str, Any], where: str) -> bool:
    """A dict with names for keys: its JSON with null for what is no scalar, and those by their place."""
    try:
        text = _as_json({key: item if type(item) in _SCALARS else None for key, item in value.items()})
    except ValueError:  # an integer of thousands of digits
        return False
    rest = [pair for pair in enumerate(value.items()) if type(pair[1][1]) not in _SCALARS]
    _head(out, b"O", _text(text), _length(len(rest)))
    for place, (key, item) in rest:
        out += _length(place)
        _write(out, item, f"{where}[{key!r}]")
    return True


def _write_array(out: bytearray, value: np.ndarray[Any, Any], where: str) -> None:
    if value.dtype.hasobject or value.dtype.fields is not None:
        raise ForeignValue(f"an array of {value.dtype} at {where or 'its top'}")
    _head(out, b"A", _text(value.dtype.str), _shape(value.shape))
    _write_values(out, np.ascontiguousarray(value).reshape(-1))


def _write_tensor(out: bytearray, value: Any) -> None:
    import torch  # here: only what holds tensors needs it, and then it is loaded

    flat = value if value.ndim == 1 and _lies_ready(value) else value.detach().cpu().contiguous().reshape(-1)
    _head(out, b"X", _text(str(value.dtype).removeprefix("torch.")), _shape(tuple(value.shape)))
    try:
        array = flat.numpy()
    except TypeError:  # bfloat16 and its like, which numpy does not have
        array = flat.view(torch.uint8).numpy()
    _write_values(out, array)


def _lies_ready(tensor: Any) -> bool:
    """Whether it need not be moved or copied to be written, as what a batch holds need not."""
    return bool(tensor.is_cpu and not tensor.requires_grad and tensor.is_contiguous())


def _is_tensor(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ == "Tensor"


def _are_rows(tensors: list[Any]) -> bool:
    """Whether they are what a batch holds of its samples: one row each, of one kind."""
    return set(map(_LAYOUT, tensors)) == {(tensors[0].dtype, 1, True)}


def _write_rows(out: bytearray, tensors: list[Any]) -> None:
    """Writes the rows as one tensor, and the length of each."""
    import torch  # as above

    _write_cut_rows(out, TensorRows(torch.cat(tensors), [tensor.numel() for tensor in tensors]), "")


def _write_cut_rows(out: bytearray, rows: TensorRows, where: str) -> None:
    out += b"C" + _lengths_of(tuple(rows.lengths))
    _write_tensor(out, rows.joined)


@functools.lru_cache(maxsize=8)
def _lengths_of(lengths: tuple[int, ...]) -> bytes:
    """Most tensors of a batch have one row for each response, of the same lengths."""
    return dumps(list(lengths))


def _write_values(out: bytearray, flat: np.ndarray[Any, Any]) -> None:
    """Whole numbers as narrow as they are, others as they lie in memory."""
    if flat.dtype.kind in "iu" and flat.dtype.itemsize > 1 and flat.dtype.str != "<u8" and len(flat):
        _write_numbers(out, b"n", flat)
    else:
        _head(out, b"b", _text(flat.dtype.str), _blob(flat.tobytes()))


def _write_numbers(out: bytearray, tag: bytes, values: np.ndarray[Any, Any]) -> None:
    low, high = int(values.min()), int(values.max())
    place = next(place for place, (least, most) in enumerate(_RANGES) if least <= low and high <= most)
    _head(out, tag, bytes([place]), _blob(values.astype(_WIDTHS[place]).tobytes()))


def _head(out: bytearray, *parts: bytes) -> None:
    for part in parts:
        out += part


def _length(count: int) -> bytes:
    return struct.pack("<I", count)


def _blob(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _text(value: str) -> bytes:
    return _blob(value.encode("utf-8", "surrogatepass"))


def _shape(shape: tuple[int, ...]) -> bytes:
    return bytes([len(shape)]) + struct.pack(f"<{len(shape)}q", *shape)


_WRITERS: dict[type, Callable[[bytearray, Any, str], None]] = {
    type(None): lambda out, value, where: _head(out, b"N"),
    bool: lambda out, value, where: _head(out, b"1" if value else b"0"),
    int: _write_int,
    float: lambda out, value, where: _head(out, b"D", struct.pack("<d", value)),
    str: lambda out, value, where: _head(out, b"S", _text(value)),
    bytes: lambda out, value, where: _head(out, b"B", _blob(value)),
    list: _write_list,
    tuple: lambda out, value, where: _write_entries(out, b"U", value, where),
    set: lambda out, value, where: _write_entries(out, b"E", sorted(value, key=repr), where),
    dict: _write_dict,
    np.ndarray: _write_array,
    TensorRows: _write_cut_rows,
}


# -- reading


def _read(data: memoryview, at: int) -> tuple[Any, int]:
    return _READERS[bytes(data[at : at + 1])](data, at + 1)


def _read_length(data: memoryview, at: int) -> tuple[int, int]:
    return struct.unpack_from("<I", data, at)[0], at + 4


def _read_blob(data: memoryview, at: int) -> tuple[memoryview, int]:
    (size,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + size
    if end > len(data):
        raise IndexError("it ends early")
    return data[at + 8 : end], end


def _read_text(data: memoryview, at: int) -> tuple[str, int]:
    blob, end = _read_blob(data, at)
    return bytes(blob).decode("utf-8", "surrogatepass"), end


def _read_shape(data: memoryview, at: int) -> tuple[tuple[int, ...], int]:
    size = data[at]
    return struct.unpack_from(f"<{size}q", data, at + 1), at + 1 + 8 * size


def _read_entries(data: memoryview, at: int) -> tuple[list[Any], int]:
    count, at = _read_length(data, at)
    entries = []
    for _ in range(count):
        item, at = _read(data, at)
        entries.append(item)
    return entries, at


def _read_dict(data: memoryview, at: int) -> tuple[dict[Any, Any], int]:
    count, at = _read_length(data, at)
    made = {}
    for _ in range(count):
        key, at = _read(data, at)
        made[key], at = _read(data, at)
    return made, at


def _read_object(data: memoryview, at: int) -> tuple[dict[str, Any], int]:
    text, at = _read_text(data, at)
    made = json.loads(text)
    if not isinstance(made, dict):
        raise TypeError("no object")
    names = list(made)
    count, at = _read_length(data, at)
    for _ in range(count):
        place, at = _read_length(data, at)
        made[names[place]], at = _read(data, at)
    return made, at


def _read_json(data: memoryview, at: int) -> tuple[Any, int]:
    text, at = _read_text(data, at)
    return json.loads(text), at


def _read_rows(data: memoryview, at: int) -> tuple[list[Any], int]:
    lengths, at = _read(data, at)
    if bytes(data[at : at + 1]) != b"X":
        raise KeyError("no tensor")
    tensor, at = _read_tensor(data, at + 1)
    if not isinstance(lengths, list) or sum(lengths) != len(tensor):
        raise IndexError("rows of another length")
    return [row.clone() for row in tensor.split(lengths)], at


def _read_groups(data: memoryview, at: int) -> tuple[list[list[Any]], int]:
    lengths, at = _read_blob(data, at)
    table, at = _read_blob(data, at)
    rows = unpack_table(bytes(table))
    ends = [0, *np.frombuffer(lengths, "<u4").cumsum().tolist()]
    if ends[-1] != len(rows):
        raise IndexError("groups of another length")
    return [rows[begin:end] for begin, end in itertools.pairwise(ends)], at


def _read_numbers(data: memoryview, at: int) -> tuple[np.ndarray[Any, Any], int]:
    width = _WIDTHS[data[at]]
    blob, at = _read_blob(data, at + 1)
    return np.frombuffer(blob, width), at


def _read_floats(data: memoryview, at: int) -> tuple[list[float], int]:
    width = {4: "<f4", 8: "<f8"}[data[at]]
    blob, at = _read_blob(data, at + 1)
    return np.frombuffer(blob, width).astype("<f8").tolist(), at


def _read_values(data: memoryview, at: int, dtype: np.dtype[Any]) -> tuple[np.ndarray[Any, Any], int]:
    tag = bytes(data[at : at + 1])
    if tag == b"n":
        values, at = _read_numbers(data, at + 1)
        return values.astype(dtype), at
    if tag != b"b":
        raise KeyError(tag)
    name, at = _read_text(data, at + 1)
    blob, at = _read_blob(data, at)
    return np.frombuffer(blob, np.dtype(name)).copy(), at


def _read_array(data: memoryview, at: int) -> tuple[np.ndarray[Any, Any], int]:
    name, at = _read_text(data, at)
    shape, at = _read_shape(data, at)
    values, at = _read_values(data, at, np.dtype(name))
    return values.reshape(shape), at


def _read_tensor(data: memoryview, at: int) -> tuple[Any, int]:
    import torch  # as above

    name, at = _read_text(data, at)
    shape, at = _read_shape(data, at)
    dtype = getattr(torch, name)
    try:
        like = torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        like = np.dtype("<u1")
    values, at = _read_values(data, at, like)
    if not len(values):  # nothing that could be looked at as another type
        return torch.empty(0, dtype=dtype).reshape(shape), at
    tensor = torch.from_numpy(values)
    return (tensor if tensor.dtype == dtype else tensor.view(dtype)).reshape(shape), at


def _read_scalar(data: memoryview, at: int) -> tuple[Any, int]:
    name, at = _read_text(data, at)
    blob, at = _read_blob(data, at)
    return np.frombuffer(blob, np.dtype(name))[0], at


def _of(read: Callable[[memoryview, int], tuple[Any, int]], make: Callable[[Any], Any]) -> Any:
    def made(data: memoryview, at: int) -> tuple[Any, int]:
        value, end = read(data, at)
        return make(value), end

    return made


_READERS: dict[bytes, Callable[[memoryview, int], tuple[Any, int]]] = {
    b"N": lambda data, at: (None, at),
    b"1": lambda data, at: (True, at),
    b"0": lambda data, at: (False, at),
    b"I": lambda data, at: (struct.unpack_from("<q", data, at)[0], at + 8),
    b"J": _of(_read_text, int),
    b"D": lambda data, at: (struct.unpack_from("<d", data, at)[0], at + 8),
    b"S": _read_text,
    b"B": _of(_read_blob, bytes),
    b"L": _read_entries,
    b"U": _of(_read_entries, tuple),
    b"E": _of(_read_entries, set),
    b"M": _read_dict,
    b"O": _read_object,
    b"T": _read_json,
    b"C": _read_rows,
    b"g": _read_groups,
    b"t": _of(_read_blob, lambda blob: unpack_table(bytes(blob))),
    b"i": _of(_read_numbers, lambda values: values.tolist()),
    b"f": _read_floats,
    b"G": _read_scalar,
    b"A": _read_array,
    b"X": _read_tensor,
}
