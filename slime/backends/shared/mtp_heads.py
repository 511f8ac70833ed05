"""Copies the parts that a trainer did not build: MTP heads (multi-token prediction), vision, audio.

They come from the model that training started from: without them the config of a saved folder would name
tensors that the folder does not contain.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

import torch

from slime.backends.base import Bucket
from slime.utils.files.safetensors_files import all_files, read_tensors, tensor_names
from slime.utils.models.fp8_blocks import SCALE_SUFFIX, dequantize_blocks
from slime.utils.models.hub_names import folder_of
from slime.utils.models.model_config import block_size_of

logger = logging.getLogger(__name__)

_NAMED = re.compile(r"(^|\.)(mtp|nextn|visual|vision|audio|embed_vision|embed_audio|multi_modal)\w*\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def is_mtp_head(name: str, num_layers: int) -> bool:
    """Whether a hub tensor is of such a part: by its name, or as a layer after the decoder's last."""
    layer = _LAYER.search(name)
    return bool(_NAMED.search(name)) or (layer is not None and int(layer[2]) >= num_layers)


def unbuilt_heads(source: str, config: Any, written: Iterable[str], dtype: torch.dtype) -> Bucket:
    """Tensors of the MTP heads of `source` that are not among those `written`, as `dtype`."""
    num_layers, written = config.get_text_config().num_hidden_layers, set(written)
    folder = folder_of(source)
    files, block = all_files(folder), block_size_of(folder)
    names = {name for file in files for name in tensor_names(file) if is_mtp_head(name, num_layers)}
    tensors = dict(read_tensors(files, names - written))
    found: Bucket = []
    for name, tensor in tensors.items():
        if block is not None and name.endswith(SCALE_SUFFIX):
            continue
        if block is not None and (scale := tensors.get(name + SCALE_SUFFIX)) is not None:
            tensor = dequantize_blocks(tensor, scale, block, dtype)
        # Hub checkpoints keep this bias in fp32: its last bits decide which experts are chosen.
        keeps = not tensor.is_floating_point() or name.endswith("e_score_correction_bias")
        found.append((name, tensor if keeps else tensor.to(dtype)))
    if found:
        parts = "parts that were not trained (MTP heads, vision, audio)"
        logger.info("%d tensors of %s are those of %s", len(found), parts, source)
    return found
