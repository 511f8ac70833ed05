"""Reads files of `torch.save` that hold plain values, without running code.

These are formats that slime shares with others: rollout dumps, which may hold Pillow images, and the state
of a data source.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

_ARRAY_TYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
)
# Images that were read from a file have a class for each kind of file.
_IMAGE_FILES = "Png Jpeg WebP Gif Bmp Tiff Mpo Ppm"


def load_torch_file(path: Path) -> Any:
    """Read a file; code in it is refused. ValueError names a file that cannot be read."""
    import torch  # imported here: most processes that import this file never read one

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
    except Exception as error:  # a truncated file raises errors of any kind: EOFError, KeyError, ...
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


def _array_globals() -> list[Any]:
    from numpy._core import multiarray  # private, and what the pickle of an array names

    parts: list[Any] = [np.ndarray, np.dtype]
    for part in (multiarray._reconstruct, multiarray.scalar):
        parts += [part, (part, f"numpy.core.multiarray.{part.__name__}")]  # the second as numpy 1 calls it
    return parts + [type(np.dtype(name)) for name in _ARRAY_TYPES.split()]


def _image_globals() -> list[Any]:
    """Admit any image as its pixels, which the file holds decoded."""
    from PIL import Image  # only files with images need it

    kinds = [(Image.Image, f"PIL.{kind}ImagePlugin.{kind}ImageFile") for kind in _IMAGE_FILES.split()]
    return [Image.Image, *kinds]
