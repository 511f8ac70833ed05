"""Vision-language models in the FSDP trainer: built with both towers, run on packed documents with images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from slime.algorithms.vision.packed_images import PackedImages, nothing_of, pack_images
from slime.algorithms.vision.towers import attention_by_tower, family_of, run_text
from slime.backends.attention.packed_documents import register
from slime.backends.attention.share import Share
from slime.backends.base import MicroBatch
from slime.backends.fsdp.layer_execution import HFModel
from slime.catalog.vision import VISION_FAMILIES

__all__ = [
    "auto_class",
    "build",
    "family_of",
    "freeze_tower",
    "run_stream",
    "text_model",
    "tower_prefixes",
    "with_images",
]


def auto_class(config: Any) -> Any:
    """Return the transformers class of a config, with the vision tower if slime trains the family."""
    # Heavy import, only needed where a model is built.
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if family_of(config) is None else AutoModelForImageTextToText


def build(config: Any) -> HFModel:
    """Both towers on the current torch device, in fp32: packed attention for text, torch's own for images."""
    attention = attention_by_tower(register())
    lm = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation=attention)
    lm.config.use_cache = False
    return lm


def with_images(mb: MicroBatch, config: Any) -> MicroBatch:
    """Return the micro-batch with its images in the model's format; unchanged for a text model."""
    if family_of(config) is None or not mb.media:
        return mb
    documents = torch.split(mb.input_ids[0], list(mb.documents.lengths))
    names = [f"sample {position} of this rank's batch" for position in mb.positions]
    return replace(mb, images=pack_images(config, documents, mb.media, names))


def run_stream(lm: HFModel, stream: MicroBatch | Share) -> Tensor:
    """Return hidden states [T, H] of a micro-batch, or of a rank's part of one, which needs all images."""
    images = cast("PackedImages | None", stream.images)
    rows, features, shift, positions = None, None, None, stream.position_ids
    if images is not None and images.positions is not None:
        positions = images.positions
    if images is None or images.media is None:
        # Before the text model, like features: all ranks, with or without images, gather layers in one order.
        shift = nothing_of(lm, stream.input_ids.device)
    else:
        rows, features = images.rows, images.features(lm)
    return run_text(lm, stream.input_ids, positions, rows, features, shift=shift, documents=stream.documents)


def text_model(lm: HFModel) -> Any:
    """Return the decoder that reads text, without a vision tower."""
    family = family_of(lm.config)
    return lm.base_model if family is None else getattr(lm.base_model, family.text)


def tower_prefixes(config: Any) -> tuple[str, ...]:
    """Return the prefixes of the vision tower's parameter names; empty for a model without a tower."""
    family = family_of(config)
    return () if family is None else tuple(f"model.{part}." for part in family.tower)


def freeze_tower(lm: HFModel) -> None:
    """Freeze the vision tower (--freeze-vision-tower): only the text model is trained."""
    prefixes = tower_prefixes(lm.config)
    if not prefixes:
        raise ValueError(
            f"--freeze-vision-tower: {lm.config.model_type} has no vision tower that slime supports; leave "
            f"the flag out. It is for {', '.join(VISION_FAMILIES)}."
        )
    for name, parameter in lm.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)
