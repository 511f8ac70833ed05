"""Images in conversations: parts of messages for clients, expanded token ids with their spans for the model.

The content of a message with images is a list of parts: `{"type": "text", "text": ...}` and `{"type":
"image", "image": Shown(...)}`. The template writes one image token for each; prompts hold all tokens of an
image, as the model reads them; requests have one token again, together with the image.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.utils.media.image_tokens import collapse, encoder_of, images_key
from slime.utils.media.pictures import open_picture, picture_key, picture_url
from slime.utils.types import Sample

Message = dict[str, Any]


class Shown:
    """An image that equals others with the same pixels."""

    __slots__ = ("__weakref__", "key", "picture")

    def __init__(self, picture: Any) -> None:
        self.picture, self.key = picture, picture_key(picture)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shown) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - consecutive requests show the same images
    def url(self) -> str:
        return picture_url(self.picture)


@functools.lru_cache(maxsize=64)
def shown(data_url: str) -> Shown:
    """Decode the image of a data URL once, because clients send it with every turn; else NotAnImage."""
    return Shown(open_picture(data_url))


@dataclass(frozen=True, slots=True)
class Placed:
    """An image in a prompt: the ids `start <= i < end` stand for it."""

    start: int
    end: int
    shown: Shown


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt in the form in which a request sends them."""

    wire_ids: list[int]  # of the prompt, with one token for each image
    urls: tuple[str, ...]
    image_token_id: int


def pictures_in(messages: Sequence[Message]) -> list[Shown]:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [part["image"] for part in parts if part.get("type") == "image"]
    return [image if isinstance(image, Shown) else Shown(open_picture(image)) for image in images]


def expanded(
    ids: Sequence[int], pictures: Sequence[Shown], processor: Any, *, start: int
) -> tuple[list[int], list[Placed]]:
    """Expand ids with one token per image to what the model reads; places count from `start`."""
    made = encoder_of(processor).encode_prompt(ids, [one.picture for one in pictures], start=start)
    places = zip(made.spans, pictures, strict=True)
    return made.ids, [Placed(first, last, one) for (first, last), one in places]


def images_of(ids: Sequence[int], placed: Sequence[Placed], processor: Any) -> PromptImages | None:
    """Return the images of a prompt as a request sends them; None: there are none."""
    if not placed:
        return None
    token = encoder_of(processor).image_token_id
    wire = collapse(ids, [(one.start, one.end) for one in placed], (token,))
    return PromptImages(wire, tuple(one.shown.url() for one in placed), token)


def add_to_sample(sample: Sample, placed: Sequence[Placed], processor: Any) -> None:
    """Add to a sample the images within its tokens, as the trainer needs them."""
    placed = [one for one in placed if one.end <= len(sample.tokens)]
    if not placed:
        sample.multimodal_inputs = sample.image_spans = None
        return
    encoder = encoder_of(processor)
    encoded = [encoder.encode(one.shown.picture) for one in placed]
    sample.multimodal_inputs = {"images": [one.shown.picture for one in placed]}
    sample.image_spans = [(one.start, one.end) for one in placed]
    sample.multimodal_train_inputs = encoder.join(encoded)
    sample.multimodal_train_input_id = images_key(image.key for image in encoded)
