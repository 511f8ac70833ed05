"""Inserts the pictures of a row into the messages of its prompt, and loads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.data.prompt_sources import Place, Row
from slime.utils.media.pictures import NotAnImage, open_picture

Message = dict[str, Any]
_IMAGE = "image"
_PLACEHOLDER = f"<{_IMAGE}>"
_IMAGE_PARTS = ("image", "image_url", "input_image")


def fill_media(
    messages: list[Message], row: Row, keys: Mapping[str, str], *, where: object = "row"
) -> list[Message]:
    """Replace `<image>` in messages by the row's images, in order; counts must match."""
    if list(keys) != [_IMAGE]:
        raise ValueError(f"--multimodal-keys is {dict(keys)}: only a column of images is read.")
    images = _items(row.get(keys[_IMAGE]))
    count = len(images)
    filled = [_fill_message(message, images, count, where) for message in messages]
    if images:
        raise ValueError(
            f"{where}: fewer placeholders in the prompt than images; {len(images)} are left over. Write "
            f"one {_PLACEHOLDER} for each."
        )
    return filled


def _items(value: Any) -> list[Any]:
    if value is None:
        return []
    if hasattr(value, "tolist") and not isinstance(value, (bytes, bytearray, memoryview)):
        value = value.tolist()  # an array, as parquet gives it
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _fill_message(message: Message, images: list[Any], count: int, where: object) -> Message:
    """Replace the placeholders of one message by the first of `images`; the row has `count` in all."""
    content, placeholder = message.get("content"), _PLACEHOLDER
    if not isinstance(content, str) or placeholder not in content:
        return message
    parts = []
    for number, text in enumerate(content.split(placeholder)):
        if number and not images:
            raise ValueError(f"{where}: more {placeholder} placeholders than images; the row has {count}.")
        if number:
            parts.append(_part(images.pop(0)))
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _part(item: Any) -> Message:
    """Return an image as a message part; a part (with bounds on its pixels, say) is returned unchanged."""
    if not isinstance(item, dict):
        return {"type": _IMAGE, _IMAGE: item}
    return item if "type" in item else {"type": _IMAGE, **item}


def read_pictures(messages: Any, keys: Mapping[str, str], where: object) -> dict[str, list[Any]] | None:
    """Return the pictures of a conversation in the form that processors take; None: it has none."""
    if not isinstance(messages, list):
        raise ValueError(f"{where}: a model with a processor needs the prompt as a list of messages.")
    folder = Path(where.path).parent if isinstance(where, Place) else None
    column = keys.get(_IMAGE)
    images: list[Any] = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _IMAGE_PARTS:
                try:
                    images.append(open_picture(part, folder=folder))
                except NotAnImage as error:
                    raise ValueError(
                        f"{where}: image {len(images) + 1} of column {column!r} (--multimodal-keys): {error}."
                    ) from error
            elif kind in ("video", "audio"):
                raise ValueError(
                    f"{where}: the prompt holds a part of type {kind!r}; models are trained on pictures and "
                    "text only."
                )
    return {"images": images} if images else None


def bare_messages(messages: list[Message]) -> list[Message]:
    """Return the messages without pixels: chat templates only need to see where images are."""

    def bare(part: Any) -> Any:
        return {"type": "image"} if isinstance(part, dict) and part.get("type") in _IMAGE_PARTS else part

    return [
        {**message, "content": [bare(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
