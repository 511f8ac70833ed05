"""Pictures in conversations: parts of messages outside, expanded token ids with their spans inside.

A message with pictures has a list of parts as its content: `{"type": "text", "text": ...}` and `{"type":
"image", "image": Shown(...)}`. The template writes one image token for each; prompts hold all tokens of a
picture, as the model reads them, and requests have one again, with the picture beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime.data.media import bare_messages
from slime.utils.media.image_tokens import collapse, encoder_of, images_key
from slime.utils.media.pictures import open_picture, picture_key, picture_url
from slime.utils.types import Sample

Message = dict[str, Any]


class Shown:
    """A picture that equals others with the same pixels."""

    __slots__ = ("__weakref__", "key", "picture")

    def __init__(self, picture: Any) -> None:
        self.picture, self.key = picture, picture_key(picture)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shown) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - the pictures of requests that follow each other
    def url(self) -> str:
        return picture_url(self.picture)


@functools.lru_cache(maxsize=64)
def shown(data_url: str) -> Shown:
    """The picture of a data URL, decoded once: clients send it with every turn. NotAnImage: it is none."""
    return Shown(open_picture(data_url))


@dataclass(frozen=True, slots=True)
class Placed:
    """A picture at its place in a prompt: ids `start <= i < end` stand for it."""

    start: int
    end: int
    shown: Shown


@dataclass(frozen=True, slots=True)
class PromptImages:
    """What a request sends for a prompt with pictures."""

    wire_ids: list[int]  # of the prompt, one image token for each picture
    urls: tuple[str, ...]
    image_token_id: int


def pictures_in(messages: Sequence[Message]) -> list[Shown]:
    return list(_pictures(messages))


def _pictures(messages: Sequence[Message]) -> Iterator[Shown]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "image":
                image = part["image"]
                yield image if isinstance(image, Shown) else Shown(open_picture(image))


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Templates only look whether there is a picture."""
    return bare_messages(list(messages))


def expanded(
    ids: Sequence[int], pictures: Sequence[Shown], processor: Any, *, start: int
) -> tuple[list[int], list[Placed]]:
    """Ids with one image token per picture -> as the model reads them; places count from `start`."""
    made = encoder_of(processor).encode_prompt(ids, [one.picture for one in pictures], start=start)
    places = zip(made.spans, pictures, strict=True)
    return made.ids, [Placed(first, last, one) for (first, last), one in places]


def images_of(ids: Sequence[int], placed: Sequence[Placed], processor: Any) -> PromptImages | None:
    """The pictures of a prompt as an engine is asked with them; None where it shows no picture."""
    if not placed:
        return None
    token = encoder_of(processor).image_token_id
    wire = collapse(ids, [(one.start, one.end) for one in placed], token)
    return PromptImages(wire, tuple(one.shown.url() for one in placed), token)


def add_to_sample(sample: Sample, placed: Sequence[Placed], processor: Any) -> None:
    """What the trainer needs of the pictures that stand in the sample's tokens; those behind them are cut."""
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
