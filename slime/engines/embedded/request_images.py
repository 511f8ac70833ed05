"""Reads images of requests, expands their tokens in the prompt and caches their features."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slime.algorithms.vision.positions import document_positions
from slime.algorithms.vision.towers import Features, image_features
from slime.catalog.vision import VISION_FAMILIES
from slime.utils.media.image_tokens import EncodedImage, ImageEncoder, expand, join_inputs
from slime.utils.media.pictures import open_media

_FEATURE_BYTES = 1 << 30
_MAX_IMAGES = 256  # limit of one prompt


@dataclass(frozen=True, eq=False, slots=True)
class PlacedImage:
    """A picture in a prompt. `places` [N]: ascending positions of its image tokens."""

    image: EncodedImage
    places: np.ndarray

    @property
    def key(self) -> int:
        """A negative number, so not a token id, to distinguish prefixes with different pictures."""
        return -1 - int(self.image.key, 16)

    def within(self, start: int, end: int) -> tuple[int, int]:
        """Return the features that belong to the tokens `start..end` of the prompt."""
        first, last = np.searchsorted(self.places, (start, end))
        return int(first), int(last)


@dataclass(frozen=True, eq=False, slots=True)
class ImageRows:
    """Maps features `first..last` of a picture to rows `rows` of a pass."""

    image: EncodedImage
    first: int
    last: int
    rows: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class ImagePrompt:
    """A prompt with its pictures expanded. Without any, all but `ids` are empty."""

    ids: list[int]
    images: tuple[PlacedImage, ...] = ()
    keys: list[int] | None = None  # `ids` with the keys of pictures in place of image tokens; None: the same
    positions: np.ndarray | None = None  # [3, P] of families with grids; None: 0, 1, 2, ...
    shift: int = 0  # offset from the index of a later token to its position


class ImageReader:
    """Turns ids and `image_data` into prompts, for the model with this config and processor."""

    def __init__(self, encoder: ImageEncoder, config: Any):
        self._encoder, self._config = encoder, config
        self._in_grid = VISION_FAMILIES[config.model_type].grid_positions

    def read(self, ids: list[int], data: Any) -> ImagePrompt:
        """Ids with one image token per picture; ids that are already expanded are unchanged."""
        items = [] if data is None else data if isinstance(data, list) else [data]
        if len(items) > _MAX_IMAGES:
            raise ValueError(f"image_data has {len(items)} images for one prompt: at most {_MAX_IMAGES}")
        images = [self._encode(item, number) for number, item in enumerate(items)]
        media_ids = self._encoder.media_ids
        found = sum(token in media_ids for token in ids)
        if found == len(images):
            expanded, _ = expand(ids, images, media_ids)
        elif images and found == sum(image.num_features for image in images):
            expanded = ids
        else:
            names = " or ".join(map(str, sorted(media_ids)))
            raise ValueError(
                f"input_ids has {found} image tokens (id {names}) for {len(images)} images of image_data: "
                "write one for each image"
            )
        return self._placed(expanded, images) if images else ImagePrompt(ids)

    def _encode(self, item: Any, number: int) -> EncodedImage:
        try:
            return self._encoder.encode(open_media(_raw(item)))
        except ValueError as error:
            raise ValueError(f"image_data[{number}]: {error}") from error

    def _placed(self, ids: list[int], images: Sequence[EncodedImage]) -> ImagePrompt:
        places = np.flatnonzero(np.isin(ids, list(self._encoder.media_ids)))
        placed, start = [], 0
        for image in images:
            count = image.num_features
            placed.append(PlacedImage(image, places[start : start + count]))
            start += count
        keys = list(ids)
        for place, key in ((place, one.key) for one in placed for place in one.places.tolist()):
            keys[place] = key
        if not self._in_grid:
            return ImagePrompt(ids, tuple(placed), keys)
        media = join_inputs([image.tensors for image in images])
        positions, after = document_positions(self._config, ids, media)
        return ImagePrompt(ids, tuple(placed), keys, positions, after - len(ids))


def _raw(item: Any) -> Any:
    """Return the image data to decode, from a data URL or bare base64; paths and URLs are refused.

    A video is a part of a message, {"type": "video", "video": frames, "fps": number}.
    """
    if isinstance(item, dict) and item.get("type") == "video":
        frames = item.get("video")
        return {**item, "video": [_raw(f) for f in frames] if isinstance(frames, list) else None}
    if isinstance(item, dict):
        item = item.get("url", item)
    if not isinstance(item, str):
        raise ValueError("it must be text: a data URL, or base64")
    if item.startswith("data:"):
        return item
    try:
        return base64.b64decode(item, validate=True)
    except ValueError:
        raise ValueError("it is neither a data URL nor base64; engines read no files and addresses") from None


class FeatureCache:
    """Features of pictures, computed once and kept until the weights change or memory is needed."""

    def __init__(self, model: Any, device: torch.device):
        self._model, self._device = model, device
        self._made: OrderedDict[str, Features] = OrderedDict()
        self.num_computed = 0  # pictures that went through the tower

    def clear(self) -> None:
        self._made.clear()

    def rows(self, parts: Sequence[ImageRows]) -> tuple[torch.Tensor, Features]:
        """Return the rows of a pass that are image tokens, and their features."""
        self._compute({part.image.key: part.image for part in parts if part.image.key not in self._made})
        features = Features.joined([self._made[p.image.key].part(p.first, p.last) for p in parts])
        for part in parts:
            self._made.move_to_end(part.image.key)
        while len(self._made) > 1 and sum(f.nbytes for f in self._made.values()) > _FEATURE_BYTES:
            self._made.popitem(last=False)
        rows = torch.from_numpy(np.concatenate([part.rows for part in parts]))
        return rows.to(self._device), features

    def _compute(self, missing: dict[str, EncodedImage]) -> None:
        if not missing:
            return
        inputs = join_inputs([image.tensors for image in missing.values()])
        made = image_features(self._model, {name: tensor.to(self._device) for name, tensor in inputs.items()})
        start = 0
        for key, image in missing.items():
            count = image.num_features
            self._made[key] = made.part(start, start + count)
            start += count
        self.num_computed += len(missing)
