"""Pictures of a row: put into the messages of its prompt, and read."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.data.prompt_sources import Place, Row
from slime.utils.media.pictures import NotAnImage, open_picture
from slime.utils.types import MultimodalTypes

Message = dict[str, Any]
_IMAGE = MultimodalTypes.IMAGE
_IMAGE_PARTS = ("image", "image_url", "input_image")


def fill_media(
    messages: list[Message], row: Row, keys: Mapping[str, str], *, where: object = "row"
) -> list[Message]:
    """Replace `<image>`-like placeholders in messages by the row's media, in order; counts must match."""
    queues: dict[str, list[Any]] = {}
    types: dict[str, str] = {}
    for name, column in keys.items():
        kind = MultimodalTypes.get(name)
        if kind is None:
            raise ValueError(
                f"--multimodal-keys names {name!r}; known are {[t.name for t in MultimodalTypes.all()]}."
            )
        queues[kind.placeholder] = _items(row.get(column))
        types[kind.placeholder] = kind.name
    counts = {placeholder: len(items) for placeholder, items in queues.items()}
    pattern = re.compile("(" + "|".join(re.escape(placeholder) for placeholder in queues) + ")")
    filled = [_fill_message(message, pattern, queues, types, counts, where) for message in messages]
    left = {types[p]: len(items) for p, items in queues.items() if items}
    if left:
        raise ValueError(
            f"{where}: more media than placeholders in the prompt; left over: {left}. Write one "
            f"{' or '.join(queues)} for each."
        )
    return filled


def _items(value: Any) -> list[Any]:
    if value is None:
        return []
    if hasattr(value, "tolist") and not isinstance(value, (bytes, bytearray, memoryview)):
        value = value.tolist()  # an array, as parquet gives it
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _fill_message(
    message: Message,
    pattern: re.Pattern[str],
    queues: dict[str, list[Any]],
    types: dict[str, str],
    counts: dict[str, int],
    where: object,
) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or not pattern.search(content):
        return message
    parts = []
    for piece in pattern.split(content):
        if piece in queues:
            if not queues[piece]:
                raise ValueError(
                    f"{where}: more {piece} placeholders than items of that kind; the row has "
                    f"{counts[piece]}."
                )
            parts.append(_part(queues[piece].pop(0), types[piece]))
        elif piece:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}


def _part(item: Any, kind: str) -> Message:
    """A part of a message: an item that is one already stays, with bounds on its pixels, say."""
    if not isinstance(item, dict):
        return {"type": kind, kind: item}
    return item if "type" in item else {"type": kind, **item}


def read_pictures(messages: Any, keys: Mapping[str, str], where: object) -> dict[str, list[Any]] | None:
    """The pictures of a conversation in the form processors take; None: it has none."""
    if not isinstance(messages, list):
        raise ValueError(f"{where}: a model with a processor needs the prompt as a list of messages.")
    folder = Path(where.path).parent if isinstance(where, Place) else None
    column = keys.get(_IMAGE.name)
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
    """The messages without the pictures themselves, which chat templates only look for."""

    def bare(part: Any) -> Any:
        return {"type": "image"} if isinstance(part, dict) and part.get("type") in _IMAGE_PARTS else part

    return [
        {**message, "content": [bare(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
