"""Runs the two towers of a transformers vision-language model separately.

Features of pictures are computed once and put in place of image tokens; the text model runs on embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.catalog.vision import VISION_FAMILIES, VisionFamily
from slime.utils.media.videos import SECONDS

Media = dict[str, Tensor]  # of the processor: pixel_values and what goes with them


@dataclass(frozen=True, slots=True)
class Features:
    """The embeddings of N image tokens that the text model receives."""

    main: Tensor  # [N, H], in place of their embeddings
    deep: tuple[Tensor, ...] = ()  # [N, H] each, added to the output of the first layers

    def take(self, rows: Tensor) -> Features:
        return Features(self.main.index_select(0, rows), tuple(f.index_select(0, rows) for f in self.deep))

    def part(self, start: int, end: int) -> Features:
        return Features(self.main[start:end], tuple(f[start:end] for f in self.deep))

    @classmethod
    def joined(cls, parts: Sequence[Features]) -> Features:
        if len(parts) == 1:
            return parts[0]
        deep = zip(*(part.deep for part in parts), strict=True)
        return cls(torch.cat([part.main for part in parts]), tuple(torch.cat(each) for each in deep))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.main, *self.deep))


def family_of(config: Any) -> VisionFamily | None:
    """Return the row of a model's family; None: it reads text only."""
    return VISION_FAMILIES.get(config.model_type)


def attention_by_tower(name: str) -> dict[str, str]:
    """Return a value for `attn_implementation`: `name` for text, a non-causal one for pictures."""
    return {"text_config": name, "vision_config": "sdpa"}


def image_features(lm: Any, media: Media) -> Features:
    """Return the features of all image tokens of the pictures, in their order."""
    pixels = media["pixel_values"].to(lm.get_input_embeddings().weight.dtype)
    inputs = {name: tensor for name, tensor in media.items() if name != SECONDS}
    found = lm.base_model.get_image_features(**{**inputs, "pixel_values": pixels}, return_dict=True)
    deep = getattr(found, "deepstack_features", None) or ()
    return Features(_flat(found.pooler_output), tuple(_flat(layer) for layer in deep))


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    return features if isinstance(features, Tensor) else torch.cat(tuple(features))


def run_text(
    lm: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    rows: Tensor | None,
    features: Features | None,
    *,
    shift: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Hidden states [T, H] of a stream [1, T]; `rows` [N], ascending: where the features stand in it.

    `shift`: a number that is added to all embeddings.
    """
    family = VISION_FAMILIES[lm.config.model_type]
    embedded = lm.get_input_embeddings()(input_ids)
    if shift is not None:
        embedded = embedded + shift.to(embedded.dtype)
    if features is not None and rows is not None:
        embedded = embedded.index_copy(1, rows, features.main[None].to(embedded.dtype))
        if features.deep:
            places = torch.zeros(input_ids.shape, dtype=torch.bool, device=input_ids.device)
            places[0, rows] = True
            more |= {"visual_pos_masks": places, "deepstack_visual_embeds": list(features.deep)}
    text = getattr(lm.base_model, family.text)
    out = text(inputs_embeds=embedded, position_ids=position_ids, use_cache=False, **more)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def smallest_picture(config: Any, device: torch.device) -> Media:
    """Return the inputs of a picture of one token, the smallest that runs the whole tower."""
    vision = config.vision_config
    if VISION_FAMILIES[config.model_type].tiles:
        size = vision.image_size
        pixels = torch.ones(1, 1, vision.num_channels, size, size, device=device)
        mask = torch.ones(1, 1, size, size, dtype=torch.int64, device=device)
        return {"pixel_values": pixels, "pixel_attention_mask": mask}
    merge = vision.spatial_merge_size
    channels = vision.to_dict().get("in_channels") or vision.in_chans
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, merge, merge]], device=device)
    return {"pixel_values": torch.ones(merge * merge, width, device=device), "image_grid_thw": grid}


def num_image_tokens(config: Any, media: Mapping[str, Any]) -> int:
    """Return the number of image tokens of the pictures."""
    if VISION_FAMILIES[config.model_type].tiles:
        vision = config.vision_config
        per_tile = int((vision.image_size // vision.patch_size) ** 2 / config.scale_factor**2)
        return int(media["pixel_values"].shape[1]) * per_tile
    merge = config.vision_config.spatial_merge_size
    return int(torch.as_tensor(media["image_grid_thw"]).prod(-1).sum()) // merge**2
