"""Encodes the difference of two versions of a tensor's bytes compactly, and applies it bit by bit.

A payload is one zstd frame. Its first byte says how the rest is laid out: *sparse* (how many elements
changed, the gaps between their positions, one value each) or *dense* (one value for every element), whichever
the share of changed elements makes smaller. A value is `old ^ new` with the encoding "xor" and `new` with
"overwrite". Gaps and values are laid out by byte plane: the upper bytes are nearly all alike, and compress to
nothing.

Measured on a bfloat16 matrix of which 3.0 % of the elements change: 7.1 MB are
sent as 133 kB (xor) or 251 kB (overwrite).
"""

from __future__ import annotations

import concurrent.futures
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from slime.utils.machine.cores import num_cores

_SPARSE, _DENSE = 0, 1
_DENSE_FROM = 0.25  # above this share of changed elements, positions cost more than they save
_ZSTD_LEVEL = 1
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_COUNT_BYTES = 8
_MAX_THREADS = 8


class DeltaError(RuntimeError):
    """A delta that cannot be applied: it is damaged, or was made for other bytes."""


def checksum_function(name: str) -> Callable[[Any], str]:
    """Return the function that computes the checksum of a buffer of bytes, as text."""
    if name == "xxh3-128":
        import xxhash  # an extra: only deltas need it

        return lambda data: xxhash.xxh3_128_hexdigest(data)
    if name == "blake3":
        import blake3  # type: ignore[import-not-found]  # not an extra of slime: only this checksum needs it

        return lambda data: blake3.blake3(data).hexdigest()
    return lambda data: f"{zlib.adler32(data):08x}"


def worker_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Return threads for tensors in parallel: zstd, checksums and numpy release Python's lock."""
    return concurrent.futures.ThreadPoolExecutor(min(_MAX_THREADS, num_cores()))


def encode(old: np.ndarray, new: np.ndarray, itemsize: int, encoding: str) -> tuple[int, bytes]:
    """Return (number of changed elements, payload); the payload of equal bytes is empty.

    `old` and `new` are flat arrays of the same number of bytes; `itemsize` is that of the tensor's elements.
    """
    before, after = old.view(_UNSIGNED[itemsize]), new.view(_UNSIGNED[itemsize])
    positions = np.flatnonzero(before != after)
    if not positions.size:
        return 0, b""
    import zstandard  # an extra: only deltas need it

    dense = positions.size >= _DENSE_FROM * after.size
    where = slice(None) if dense else positions
    values = after[where] ^ before[where] if encoding == "xor" else after[where]
    parts = [bytes([_DENSE if dense else _SPARSE])]
    if not dense:
        gaps: np.ndarray = np.diff(positions, prepend=0).astype(_gap_type(after.size))
        parts += [positions.size.to_bytes(_COUNT_BYTES, "little"), _to_planes(gaps)]
    raw = b"".join([*parts, _to_planes(values)])
    return positions.size, zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)


def decode(payload: bytes, num_elements: int, itemsize: int) -> tuple[slice | np.ndarray, np.ndarray]:
    """Return which elements of a tensor change, and a value for each; DeltaError: it is damaged."""
    raw = _decompress(payload, limit=1 + _COUNT_BYTES + num_elements * (8 + itemsize))
    try:
        return _read(raw, num_elements, np.dtype(_UNSIGNED[itemsize]))
    except (IndexError, ValueError) as error:
        raise DeltaError(f"its payload does not fit a tensor of {num_elements} elements ({error})") from error


def apply(payload: bytes, data: np.ndarray, itemsize: int, encoding: str) -> None:
    """Apply a payload to `data`, a flat array of bytes, in place; DeltaError is raised before any change."""
    elements = data.view(_UNSIGNED[itemsize])
    where, values = decode(payload, elements.size, itemsize)
    if encoding == "xor":
        elements[where] ^= values
    else:
        elements[where] = values


def _decompress(payload: bytes, limit: int) -> bytes:
    import zstandard  # as above

    try:
        size = zstandard.frame_content_size(payload)  # a damaged size must not allocate all memory
        if not 0 < size <= limit:
            raise DeltaError(f"its payload claims {size} bytes, more than the possible {limit}")
        return bytes(zstandard.ZstdDecompressor().decompress(payload))
    except zstandard.ZstdError as error:
        raise DeltaError(f"its payload is not a zstd frame ({error})") from error


def _read(raw: bytes, num_elements: int, dtype: np.dtype) -> tuple[slice | np.ndarray, np.ndarray]:
    if raw[0] == _DENSE:
        return slice(None), _from_planes(raw, 1, num_elements, dtype)
    count = int.from_bytes(raw[1 : 1 + _COUNT_BYTES], "little")
    gap_type, start = np.dtype(_gap_type(num_elements)), 1 + _COUNT_BYTES
    if len(raw) != start + count * (gap_type.itemsize + dtype.itemsize):
        raise ValueError(f"{len(raw)} bytes for {count} changed elements")
    positions = np.cumsum(_from_planes(raw, start, count, gap_type), dtype=np.uint64)
    if count and positions[-1] >= num_elements:
        raise ValueError(f"position {positions[-1]}")
    return positions, _from_planes(raw, start + count * gap_type.itemsize, count, dtype)


def _gap_type(num_elements: int) -> type:
    return np.uint32 if num_elements < 2**32 else np.uint64


def _to_planes(values: np.ndarray) -> bytes:
    return values.view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _from_planes(raw: bytes, start: int, count: int, dtype: np.dtype) -> np.ndarray:
    dtype = np.dtype(dtype)
    planes = np.frombuffer(raw, np.uint8, count * dtype.itemsize, start).reshape(dtype.itemsize, count)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
