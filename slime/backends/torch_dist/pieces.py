"""Reads the index of a torch_dist folder: every tensor's size, and the file of each of its pieces.

Its `.metadata` is a pickle of torch's and Megatron's classes, of any release. None of them is loaded:
placeholder classes receive the content, so that an untrusted file runs no code.
"""

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.utils.files.torch_dist_folder import TENSORS

_READ = (torch.float32, torch.bfloat16, torch.float16)


class UnknownLayout(ValueError):
    """A complete folder with tensors that slime does not support."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of one tensor: its place in the tensor, and its place in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    key: str
    size: tuple[int, ...]
    pieces: tuple[Piece, ...]


class _StandIn:
    """Placeholder that stores the arguments or the state of an object of any class."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


_PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict, ("builtins", "set"): set}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _PLAIN.get((module, name), _StandIn)


def damaged(folder: Path, what: str) -> ValueError:
    return ValueError(f"checkpoint {folder} cannot be read: {what}; copy it again, or convert it again.")


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder by its key; other entries (random states, settings) are skipped."""
    try:
        written = _Unpickler(io.BytesIO((folder / TENSORS).read_bytes())).load()
        places: dict[str, dict[tuple[int, ...], Any]] = defaultdict(dict)
        for index, info in written.storage_data.items():
            places[index.fqn][tuple(vars(index).get("offset") or ())] = info
        return {
            key: StoredTensor(key, tuple(entry.size), _pieces(entry, places[key]))
            for key, entry in written.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
    except UnknownLayout:
        raise
    except Exception as error:  # a truncated or foreign pickle may raise anything
        raise damaged(folder, f"its {TENSORS} is damaged ({type(error).__name__}: {error})") from None


def _pieces(entry: Any, places: dict[tuple[int, ...], Any]) -> tuple[Piece, ...]:
    found = []
    for chunk in entry.chunks:
        info = places[tuple(chunk.offsets)]
        if vars(info).get("transform_descriptors"):
            raise UnknownLayout("its files are compressed")
        found.append(
            Piece(tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length)
        )
    return tuple(found)


def why_incomplete(folder: Path, tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return which file is missing or too short for its pieces; contents are not read."""
    ends: dict[str, int] = {}
    for tensor in tensors.values():
        for piece in tensor.pieces:
            ends[piece.file] = max(ends.get(piece.file, 0), piece.start + piece.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        if Path(name).name != name or not file.is_file():
            return f"{name} is missing, which its {TENSORS} names"
        if file.stat().st_size < end:
            return f"{name} ends after {file.stat().st_size} bytes, where its {TENSORS} needs {end}"
    return None


def read_slice(folder: Path, tensor: StoredTensor, index: tuple[int, ...]) -> Tensor:
    """Read `tensor[index]` from all pieces that it overlaps, whichever ranks wrote them."""
    whole: Tensor | None = None
    filled = 0
    for piece in tensor.pieces:
        inside = [i - offset for i, offset in zip(index, piece.offsets, strict=False)]
        if any(not 0 <= i < size for i, size in zip(inside, piece.sizes, strict=False)):
            continue
        part = _read_piece(folder, tensor.key, piece)[tuple(inside)]
        if whole is None:
            whole = torch.empty(tensor.size[len(index) :], dtype=part.dtype)
        offsets = piece.offsets[len(index) :]
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
        filled += part.numel()
    if whole is None or filled != whole.numel():
        raise damaged(folder, f"its {TENSORS} names no file for a part of {tensor.key}")
    return whole


def _read_piece(folder: Path, key: str, piece: Piece) -> Tensor:
    with (folder / piece.file).open("rb") as stream:
        stream.seek(piece.start)
        content = stream.read(piece.length)
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        tensor = tensor.detach().reshape(piece.sizes)
    except Exception as error:  # torch may raise anything for damaged bytes
        raise damaged(folder, f"{piece.file} is damaged at {key} ({type(error).__name__})") from None
    if tensor.dtype not in _READ:
        raise UnknownLayout(f"{key} is {tensor.dtype}, not in 16 or 32 bit")
    return tensor
