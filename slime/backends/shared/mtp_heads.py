"""Heads that predict further tokens and that a trainer did not build: copied
unchanged from the model it started from.

Without them a written folder would announce heads in its config that it does not hold.
"""

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from slime.backends.base import Bucket
from slime.utils.fp8 import SCALE_SUFFIX, dequantize_blocks
from slime.utils.fp8_config import block_size_of

logger = logging.getLogger(__name__)

_NAMED = re.compile(r"(^|\.)(mtp|nextn)\w*\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def is_further_head(name: str, num_layers: int) -> bool:
    """Whether a hub tensor belongs to a head: by its name, or because
    its layer comes after the decoder's last.
    """
    layer = _LAYER.search(name)
    return bool(_NAMED.search(name)) or (layer is not None and int(layer[2]) >= num_layers)


def unbuilt_heads(source: str, config: Any, written: Iterable[str], dtype: torch.dtype) -> Bucket:
    """Tensors of the heads of `source` that are not among those `written`, as `dtype`."""
    num_layers, written = config.get_text_config().num_hidden_layers, set(written)
    folder = _folder_of(source)
    found = _read(folder, lambda name: is_further_head(name, num_layers) and name not in written, dtype)
    if found:
        logger.info(
            "%d tensors of heads that predict further tokens are those of %s: they were not trained",
            len(found),
            source,
        )
    return found


def _folder_of(source: str) -> Path:
    """A hub id was loaded before, so its files are in the cache."""
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils import cached_file  # only needed here

    return Path(cached_file(source, "config.json")).parent


def _read(folder: Path, wanted: Callable[[str], bool], dtype: torch.dtype) -> Bucket:
    from safetensors import safe_open  # with transformers, only needed here

    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118 - no dict
    block = block_size_of(folder)
    found: Bucket = []
    for name, tensor in tensors.items():
        if name.endswith(SCALE_SUFFIX) and block is not None:
            continue
        scale = tensors.get(name + SCALE_SUFFIX) if block is not None else None
        if scale is not None:
            tensor = dequantize_blocks(tensor, scale, block, dtype)
        found.append((name, tensor.to(dtype) if tensor.is_floating_point() else tensor))
    return found
