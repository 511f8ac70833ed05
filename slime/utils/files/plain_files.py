"""Files of plain values (numbers, text, lists, dicts, tensors, arrays), read without running code.

Pillow's images are read too: rollout dumps of samples that show some hold them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_ARRAY_TYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
)
# Of images that were read from a file, the class says of which kind.
_IMAGE_FILES = "Png Jpeg WebP Gif Bmp Tiff Mpo Ppm"


def save_plain(value: Any, path: Path) -> None:
    """ValueError where the value holds something that
    `load_plain` would refuse: it is told now, not at the resume.
    """
    found = foreign_value(value)
    if found is not None:
        raise ValueError(
            f"{path.name} cannot hold {found}: keep numbers, text, lists, dicts, tensors or arrays there "
            "(metadata of samples, state of a data source)."
        )
    import torch  # imported where it is used: most processes that import this file never get here

    torch.save(value, path)


def load_plain(path: Path) -> Any:
    """Inverse of `save_plain`; code in a file is refused. ValueError names a file that cannot be read."""
    import torch  # as above

    try:
        try:
            # Arrays are admitted by the restricted loader only when their parts are named.
            with torch.serialization.safe_globals(_array_globals()):
                return torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:
            if "GLOBAL PIL." not in str(error):
                raise
            with torch.serialization.safe_globals([*_array_globals(), *_image_globals()]):
                return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # half a file makes the loader raise anything: EOFError, KeyError, ...
        if foreign := re.search(r"GLOBAL (\S+) was not an allowed", str(error)):
            raise ValueError(
                f"{path} holds a {foreign[1]}: it is read without running code, so it may only hold numbers, "
                "text, lists, dicts, tensors, arrays and images."
            ) from None
        said = str(error).partition("\n")[0][:200]
        raise ValueError(
            f"{path} cannot be read: it is missing, damaged or not what it should be "
            f"({type(error).__name__}: {said})"
        ) from error


def foreign_value(value: Any, where: str = "") -> str | None:
    """`a Thing at ['metadata'][3]`, the first value that is not plain; None: all are."""
    kind = type(value)
    if kind in _ATOMS:
        return None
    import torch  # as above

    if isinstance(value, (torch.Tensor, np.generic)):
        return None
    if isinstance(value, np.ndarray) and value.dtype.name in _ARRAY_TYPES.split():
        return None
    if kind not in (dict, list, tuple, set):
        return f"a {kind.__qualname__} at {where or 'its top'}"
    if kind is not dict and _ATOMS.issuperset(map(type, value)):
        return None  # the usual case, and long: token ids, log-probs
    entries = value.items() if kind is dict else enumerate(value)
    for key, item in entries:
        found = foreign_value(item, f"{where}[{key!r}]")
        if found is None and type(key) not in _ATOMS | {tuple}:
            found = f"a {type(key).__qualname__} as a key at {where or 'its top'}"
        if found is not None:
            return found
    return None


def _array_globals() -> list[Any]:
    from numpy._core import multiarray  # private, and what the pickle of an array names

    parts: list[Any] = [np.ndarray, np.dtype]
    for part in (multiarray._reconstruct, multiarray.scalar):
        parts += [part, (part, f"numpy.core.multiarray.{part.__name__}")]  # the second as numpy 1 calls it
    return parts + [type(np.dtype(name)) for name in _ARRAY_TYPES.split()]


def _image_globals() -> list[Any]:
    """Any image as its pixels, which the file holds decoded."""
    from PIL import Image  # only files with images need it

    kinds = [(Image.Image, f"PIL.{kind}ImagePlugin.{kind}ImageFile") for kind in _IMAGE_FILES.split()]
    return [Image.Image, *kinds]
