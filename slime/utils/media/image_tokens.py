"""Expands token ids of prompts with pictures: one id per picture in requests, all of its ids for a model.

A prompt has one image token for each picture. A model reads one token per feature of the picture, in some
families with marks around them. Example: ids [5, 9, 6] with image token 9 and a picture of three features
become [5, 9, 9, 9, 6], and the span of the picture is (1, 4).
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.utils.media.pictures import NotAnImage, Video, picture_key, to_rgb
from slime.utils.media.videos import SECONDS, encode_video, reads_videos

if TYPE_CHECKING:
    from torch import Tensor

Span = tuple[int, int]
_CACHE_BYTES = 1 << 30
_PIXELS = "pixel_values"


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """One picture or video, encoded for a model."""

    ids: tuple[int, ...]  # replace its one token
    token: int  # the id in a prompt, and of each of its features in `ids`
    tensors: dict[str, Tensor]  # output of the processor: pixel_values, image_grid_thw, ...
    key: str  # a hash of its pixels

    @property
    def num_features(self) -> int:
        return self.ids.count(self.token)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt as a model reads it. Samples of one prompt share the same `inputs` object."""

    ids: list[int]
    spans: list[Span]  # of each picture in `ids`
    inputs: dict[str, Tensor] | None  # of all pictures, joined; None: there are none
    key: str | None  # a hash of the pictures


class ImageEncoder:
    """Runs a model's processor once for each picture, and caches recent results."""

    def __init__(self, processor: Any):
        self._processor = processor
        self.image_token_id: int = processor.image_token_id
        video = (processor.video_token_id,) if reads_videos(processor) else ()
        self.media_ids = frozenset((self.image_token_id, *video))
        self._made: OrderedDict[str, EncodedImage] = OrderedDict()
        self._joined: OrderedDict[tuple[str, ...], dict[str, Tensor]] = OrderedDict()
        self._held = 0  # bytes of the cached results
        self._lock = threading.Lock()

    def encode(self, picture: Any) -> EncodedImage:
        key = picture_key(picture)
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = self._run(picture, key)
        with self._lock:
            if key not in self._made:
                self._made[key], self._held = made, self._held + made.nbytes
            while len(self._made) > 1 and self._held > _CACHE_BYTES:
                self._held -= self._made.popitem(last=False)[1].nbytes
        return made

    def _run(self, picture: Any, key: str) -> EncodedImage:
        processor = self._processor
        if isinstance(picture, Video):
            frames = [self._run(frame, "").tensors for frame in picture.frames]
            ids, tensors = encode_video(processor, picture, frames)
            return EncodedImage(tuple(ids), processor.video_token_id, tensors, key)
        try:
            found = processor(
                text=[processor.image_token],
                images=[to_rgb(picture)],
                text_kwargs={"return_tensors": None, "add_special_tokens": False},
                images_kwargs={"return_tensors": "pt"},
            )
        except NotAnImage:
            raise
        except (ValueError, ZeroDivisionError) as error:
            width, height = picture.size
            raise NotAnImage(
                f"the model's processor refuses a picture of {width} x {height} pixels ({error})"
            ) from error
        tensors = {name: found[name] for name in found if hasattr(found[name], "dim")}
        return EncodedImage(tuple(found["input_ids"][0]), self.image_token_id, tensors, key)

    def count(self, picture: Any) -> int:
        """Return the number of ids of a picture, computed from its size alone if the processor can."""
        if isinstance(picture, Video):
            return len(self.encode(picture).ids)
        width, height = picture.size
        try:
            counts = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
            return int(counts["num_image_tokens"][0])
        except Exception:  # not every processor can, and the errors differ
            return len(self.encode(picture).ids)

    def join(self, images: Sequence[EncodedImage]) -> dict[str, Tensor] | None:
        """Return the tensors of several pictures; equal calls return the same object while it is cached."""
        if len(images) < 2:
            return images[0].tensors if images else None
        keys = tuple(image.key for image in images)
        with self._lock:
            if keys not in self._joined:
                self._joined[keys] = join_inputs([image.tensors for image in images])
                while len(self._joined) > 64:
                    self._joined.popitem(last=False)
            return self._joined[keys]

    def encode_prompt(self, ids: Sequence[int], pictures: Sequence[Any], *, start: int = 0) -> EncodedPrompt:
        """Expand ids with one image token per picture; spans count from `start`."""
        images = [self.encode(picture) for picture in pictures]
        expanded, spans = expand(ids, images, self.media_ids)
        spans = [(first + start, last + start) for first, last in spans]
        return EncodedPrompt(expanded, spans, self.join(images), images_key(image.key for image in images))


@functools.lru_cache(maxsize=8)
def encoder_of(processor: Any) -> ImageEncoder:
    """Return the one encoder of a processor."""
    return ImageEncoder(processor)


def images_key(keys: Any) -> str | None:
    """Return one hash for several pictures in this order; None: there are none."""
    joined = "-".join(keys)
    return hashlib.blake2b(joined.encode(), digest_size=16).hexdigest() if joined else None


def expand(
    ids: Sequence[int], images: Sequence[EncodedImage], media_ids: Collection[int]
) -> tuple[list[int], list[Span]]:
    """Replace each token of a picture or video by its ids; return the ids and the spans."""
    found, wanted = [token for token in ids if token in media_ids], [image.token for image in images]
    if len(found) != len(wanted):
        names = " or ".join(map(str, sorted(media_ids)))
        raise ValueError(f"the prompt has {len(found)} image tokens (id {names}) for {len(images)} images")
    if found != wanted:
        raise ValueError(f"the prompt has the media tokens {found} for pictures and videos of {wanted}")
    expanded: list[int] = []
    spans: list[Span] = []
    left = iter(images)
    for token in ids:
        if token in media_ids:
            image = next(left)
            spans.append((len(expanded), len(expanded) + len(image.ids)))
            expanded += image.ids
        else:
            expanded.append(token)
    return expanded, spans


def collapse(tokens: Sequence[int], spans: Sequence[Span], media_ids: Collection[int]) -> list[int]:
    """Invert `expand`: replace each span by one token. Further tokens may follow."""
    out: list[int] = []
    end = 0
    for start, stop in spans:
        out += [*tokens[end:start], next(token for token in tokens[start:stop] if token in media_ids)]
        end = stop
    return out + list(tokens[end:])


def runs_of(tokens: Sequence[int], image_token_id: int) -> list[Span]:
    """Return the spans of pictures in families without marks: runs of image tokens."""
    is_image = np.array([0, *(token == image_token_id for token in tokens), 0])
    edges = np.flatnonzero(np.diff(is_image)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def join_inputs(parts: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Join processor outputs of several pictures, or of several samples, in order.

    Rows of patches and grids are joined along the first dimension; pictures split into tiles ([1, tiles,
    ...]) along the second.
    """
    import torch  # imported here: most processes that import this file do not need it

    if any(SECONDS in part for part in parts):
        parts = [{SECONDS: torch.zeros(len(part["image_grid_thw"])), **part} for part in parts]
    names = {tuple(sorted(part)) for part in parts}
    if len(names) > 1:
        raise ValueError(f"inputs of pictures with different keys cannot be joined: {sorted(names)}")
    dimension = 1 if torch.as_tensor(parts[0][_PIXELS]).dim() == 5 else 0
    return {name: torch.cat([torch.as_tensor(part[name]) for part in parts], dimension) for name in parts[0]}
