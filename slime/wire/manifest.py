"""The description of one weight update in shared memory: which bytes are which tensor, and their checksum.

The manifest is sent as JSON, the bytes through shared memory; nothing is pickled. The receiver verifies
every bucket before it touches a parameter.
"""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

ALIGNMENT = 16  # bytes; every tensor starts on a multiple, so that a typed view of the segment is legal
_CHUNK_WORDS = 1 << 17  # 1 MiB of int64: the temporaries of the checksum stay in cache
_CHUNK_WORDS_GPU = 1 << 24  # 128 MiB: each chunk waits for the device
# Segments of one update; each is a mapping of its own, of which a process may have some 65,000.
MAX_BUCKETS = 16_384

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_KINDS: dict[type, str] = {int: "an integer that is not negative", str: "a string", list: "a list"}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def byte_checksum(data: torch.Tensor) -> int:
    """`sum(x_i * (2 i + 1)) mod 2^64` over the int64 words of a contiguous uint8 tensor, padded with zeros.

    The factors are odd, hence invertible modulo 2^64: a change confined to one word always changes the sum.
    """
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise ValueError(
            f"byte_checksum takes a flat uint8 tensor, got {data.dtype} of shape {tuple(data.shape)}"
        )
    tail = data.numel() % 8
    body = data[: data.numel() - tail]
    if body.storage_offset() % 8 or not body.is_contiguous():
        body = body.contiguous().clone()
    words, total = body.view(torch.int64), 0
    size = _CHUNK_WORDS_GPU if data.is_cuda else _CHUNK_WORDS
    odd = torch.arange(min(size, words.numel()), dtype=torch.int64, device=data.device) * 2 + 1
    for start in range(0, words.numel(), size):
        # x * (2 (start + j) + 1) = x * (2 j + 1) + x * 2 start; int64 arithmetic wraps modulo 2^64.
        chunk = words[start : start + size]
        factors = odd[: len(chunk)]
        # CUDA has no dot product of integers.
        weighted = (chunk * factors).sum() if data.is_cuda else torch.dot(chunk, factors)
        total += int(weighted) + int(chunk.sum()) * 2 * start
    if tail:
        last = int.from_bytes(bytes(data[data.numel() - tail :].tolist()), "little")
        total += last * (2 * words.numel() + 1)
    return total % 2**64


def _read(what: str, data: Any, name: str, kind: type) -> Any:
    """Return a field of JSON: no text for a number, and no count below zero."""
    value = data[name]
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError(f"{name} of {what} must be {_KINDS[kind]}, got {reprlib.repr(value)}")
    return value


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor inside a bucket: `numel * itemsize` bytes from `offset`, row-major."""

    name: str  # hub checkpoint name
    offset: int
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def view(self, segment: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of the segment's uint8 buffer."""
        raw = segment[self.offset : self.offset + self.nbytes]
        return raw.view(DTYPES[self.dtype]).view(self.shape)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "offset": self.offset, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TensorEntry":
        name, dtype = _read("a tensor", data, "name", str), _read("a tensor", data, "dtype", str)
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} has dtype {dtype!r}, expected one of {sorted(DTYPES)}")
        shape = _read(name, data, "shape", list)
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(
                f"the shape of {name} is {reprlib.repr(shape)}: expected integers, none below zero"
            )
        entry = cls(name, _read(name, data, "offset", int), dtype, tuple(shape))
        if entry.offset % DTYPES[dtype].itemsize:
            raise ValueError(f"tensor {name} has offset {entry.offset}: not addressable as {dtype}")
        return entry


@dataclass(frozen=True, slots=True)
class BucketManifest:
    """One shared-memory segment of `nbytes` and what lies in it."""

    segment: str
    nbytes: int
    checksum: int  # byte_checksum of the first nbytes of the segment
    tensors: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        for entry in self.tensors:
            if entry.offset + entry.nbytes > self.nbytes:
                raise ValueError(
                    f"tensor {entry.name} ends at byte {entry.offset + entry.nbytes} of a "
                    f"{self.nbytes}-byte bucket"
                )

    def to_json(self) -> dict[str, Any]:
        return {
            "segment": self.segment,
            "nbytes": self.nbytes,
            "checksum": self.checksum,
            "tensors": [entry.to_json() for entry in self.tensors],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "BucketManifest":
        segment = _read("a bucket", data, "segment", str)
        tensors = tuple(TensorEntry.from_json(entry) for entry in _read(segment, data, "tensors", list))
        nbytes, checksum = (_read(segment, data, name, int) for name in ("nbytes", "checksum"))
        return cls(segment, nbytes, checksum, tensors)


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """A whole weight update: every tensor of the model in one or more buckets, and the version it becomes.

    `num_tensors` and `nbytes` are the sender's own counts, so that a lost bucket is noticed.
    """

    version: str
    buckets: tuple[BucketManifest, ...]
    num_tensors: int
    nbytes: int

    def __post_init__(self) -> None:
        tensors = [entry for bucket in self.buckets for entry in bucket.tensors]
        if len(tensors) != self.num_tensors or sum(b.nbytes for b in self.buckets) != self.nbytes:
            raise ValueError(
                f"the manifest of version {self.version} promises {self.num_tensors} tensors in "
                f"{self.nbytes} bytes "
                f"but lists {len(tensors)} in {sum(b.nbytes for b in self.buckets)}: a bucket is missing"
            )
        names = {entry.name for entry in tensors}
        if len(names) != len(tensors):
            raise ValueError(f"the manifest of version {self.version} names a tensor twice")

    @property
    def checksum(self) -> int:
        """One number for the whole update: the sum of the buckets' checksums."""
        return sum(bucket.checksum for bucket in self.buckets) % 2**64

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "num_tensors": self.num_tensors,
            "nbytes": self.nbytes,
            "buckets": [bucket.to_json() for bucket in self.buckets],
        }

    @classmethod
    def from_json(cls, data: Any) -> "WeightManifest":
        try:
            given = _read("a manifest", data, "buckets", list)
            if len(given) > MAX_BUCKETS:
                raise ValueError(
                    f"{len(given)} buckets in one update: at most {MAX_BUCKETS}; use larger ones."
                )
            buckets = tuple(BucketManifest.from_json(bucket) for bucket in given)
            if len({bucket.segment for bucket in buckets}) != len(buckets):
                raise ValueError("one segment is named by two buckets")
            counts = (_read("a manifest", data, name, int) for name in ("num_tensors", "nbytes"))
            return cls(_read("a manifest", data, "version", str), buckets, *counts)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a weight manifest: {type(error).__name__} {error}") from error


def align(offset: int) -> int:
    """The next place at or after `offset` where a tensor may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def plan_bucket(tensors: list[tuple[str, torch.Tensor]]) -> tuple[tuple[TensorEntry, ...], int]:
    """Lay named tensors out one after the other: their entries, and the bytes that the segment needs."""
    entries, offset = [], 0
    for name, tensor in tensors:
        entry = TensorEntry(name, align(offset), DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        entries.append(entry)
        offset = entry.offset + entry.nbytes
    return tuple(entries), align(offset)


def fill_bucket(
    segment_name: str, buffer: torch.Tensor, tensors: list[tuple[str, torch.Tensor]]
) -> BucketManifest:
    """Copy named tensors into a segment's uint8 buffer and describe it; padding bytes are zeroed."""
    entries, nbytes = plan_bucket(tensors)
    buffer = buffer[:nbytes]
    end = 0
    for entry, (_, tensor) in zip(entries, tensors, strict=True):
        buffer[end : entry.offset].zero_()
        entry.view(buffer).copy_(tensor)
        end = entry.offset + entry.nbytes
    buffer[end:].zero_()
    return BucketManifest(segment_name, nbytes, byte_checksum(buffer), entries)
