"""Joins the pictures of packed documents, each once, and maps them to their tokens in the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.vision.positions import document_positions, media_ids_of
from slime.algorithms.vision.towers import Features, Media, image_features, num_image_tokens, smallest_picture
from slime.catalog.vision import VISION_FAMILIES
from slime.utils.media.image_tokens import join_inputs


@dataclass(frozen=True, slots=True)
class PackedImages:
    """Pictures of a stream of T tokens, N of which are image tokens.

    Documents that share their pictures, as the samples of one prompt, share the pixels: `picks` names the
    feature of each image token. Example: two documents of one picture with two tokens: picks = [0, 1, 0, 1].
    """

    media: Media | None  # of the distinct pictures; None: the stream has none
    rows: Tensor  # [N] int64, where image tokens stand, ascending
    picks: Tensor  # [N] int64, rows of the features
    positions: Tensor | None  # [3, 1, T] int64; None: those of plain text

    def to(self, device: torch.device) -> PackedImages:
        """Move the indices to a device; pixels stay, because those of a whole step may be too many."""
        positions = None if self.positions is None else self.positions.to(device)
        return PackedImages(self.media, self.rows.to(device), self.picks.to(device), positions)

    def moved(self, real: Tensor, local: Tensor) -> PackedImages:
        """Return the images of a padded stream's tokens `local`; `real` [T]: each token's place in it."""
        total = int(max(real.max(), local.max())) + 1
        feature = torch.full((total,), -1)
        feature[real[self.rows]] = self.picks
        feature = feature[local]
        rows = (feature >= 0).nonzero()[:, 0]
        positions = self.positions
        if positions is not None:
            padded = positions.new_zeros(3, 1, total)
            padded[..., real] = positions
            positions = padded[..., local]
        return PackedImages(self.media, rows, feature[rows], positions)

    def features(self, lm: Any) -> Features:
        """Return the features of every image token, in the order of the stream."""
        assert self.media is not None, "there are no pictures in the stream"
        media = {name: tensor.to(self.picks.device) for name, tensor in self.media.items()}
        return image_features(lm, media).take(self.picks)


def pack_images(
    config: Any, documents: Sequence[Tensor], media: Sequence[Mapping[str, Any] | None], names: Sequence[str]
) -> PackedImages:
    """Join the pictures of the documents; `names` are the samples' names for messages."""
    distinct: dict[int, tuple[int, Media]] = {}  # by id(): first feature, inputs
    picks, positions, total, media_ids = [], [], 0, torch.tensor(media_ids_of(config))
    for tokens, shown, name in zip(documents, media, names, strict=True):
        count = int(torch.isin(tokens, media_ids).sum())
        expected = 0 if shown is None else num_image_tokens(config, shown)
        if count != expected:
            raise ValueError(
                f"{name} has {count} image tokens and images of {expected}: its tokens and its "
                "multimodal_train_inputs do not belong together."
            )
        if shown is not None and expected:
            if id(shown) not in distinct:
                distinct[id(shown)] = (total, {key: torch.as_tensor(value) for key, value in shown.items()})
                total += expected
            picks.append(torch.arange(expected) + distinct[id(shown)][0])
        positions.append(_positions(config, tokens, shown))
    stream = torch.cat(list(documents))
    joined = join_inputs([inputs for _, inputs in distinct.values()]) if distinct else None
    in_grid = VISION_FAMILIES[config.model_type].grid_positions
    return PackedImages(
        media=joined,
        rows=torch.isin(stream, media_ids).nonzero()[:, 0],
        picks=torch.cat(picks) if picks else torch.zeros(0, dtype=torch.int64),
        positions=torch.from_numpy(np.concatenate(positions, 1))[:, None] if in_grid else None,
    )


def _positions(config: Any, tokens: Tensor, shown: Mapping[str, Any] | None) -> np.ndarray:
    if not VISION_FAMILIES[config.model_type].grid_positions:
        return np.zeros((3, 0), np.int64)
    return document_positions(config, tokens.tolist(), shown)[0]


def nothing_of(lm: Any, device: torch.device) -> Tensor:
    """Return zero, computed from a small picture by the whole tower.

    A rank whose stream has no pictures adds it: FSDP's ranks must gather and reduce the same parameters.
    """
    made = image_features(lm, smallest_picture(lm.config, device))
    return 0.0 * sum((tensor.sum() for tensor in made.deep), made.main.sum())
