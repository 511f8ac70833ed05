"""Inserts the pictures of a row into the messages of its prompt, and loads them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.data.prompt_sources import Place, Row
from slime.utils.media.pictures import NotAnImage, open_media

Message = dict[str, Any]
_IMAGE, _VIDEO = "image", "video"
_PLACEHOLDER = re.compile(f"<({_IMAGE}|{_VIDEO})>")
_IMAGE_PARTS = ("image", "image_url", "input_image")


def fill_media(
    messages: list[Message], row: Row, keys: Mapping[str, str], *, where: object = "row"
) -> list[Message]:
    """Replace `<image>` and `<video>` in messages by those of the row, in order; counts must match."""
    if not keys or not keys.keys() <= {_IMAGE, _VIDEO}:
        raise ValueError(f"--multimodal-keys is {dict(keys)}: only columns of images and videos are read.")
    media = {kind: _items(row.get(column)) for kind, column in keys.items()}
    if _is_one_video(media.get(_VIDEO)):
        media[_VIDEO] = [media[_VIDEO]]
    counts = {kind: len(items) for kind, items in media.items()}
    filled = [_fill_message(message, media, counts, where) for message in messages]
    for kind, items in media.items():
        if items:
            raise ValueError(
                f"{where}: fewer placeholders in the prompt than {kind}s; {len(items)} are left over. Write "
                f"one <{kind}> for each."
            )
    return filled


def _is_one_video(items: list[Any] | None) -> bool:
    """Return whether a column holds the frames of a single video, and not a list of videos."""
    return bool(items) and not any(_is_video(item) for item in items or ())


def _is_video(item: Any) -> bool:
    if isinstance(item, dict):
        return _VIDEO in item
    return isinstance(item, (list, tuple)) or hasattr(item, "tolist")


def _items(value: Any) -> list[Any]:
    if value is None:
        return []
    if hasattr(value, "tolist") and not isinstance(value, (bytes, bytearray, memoryview)):
        value = value.tolist()  # an array, as parquet gives it
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _fill_message(
    message: Message, media: dict[str, list[Any]], counts: Mapping[str, int], where: object
) -> Message:
    """Replace the placeholders of one message by the first of `media`; the row has `counts` in all."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    pieces = _PLACEHOLDER.split(content)  # text, kind, text, kind, text ...
    if not set(pieces[1::2]) & media.keys():
        return message
    parts: list[Message] = []
    for place, piece in enumerate(pieces):
        if place % 2 and piece not in media:
            parts.append({"type": "text", "text": f"<{piece}>"})
        elif place % 2:
            if not media[piece]:
                found = f"the row has {counts[piece]}"
                raise ValueError(f"{where}: more <{piece}> placeholders than {piece}s; {found}.")
            parts.append(_part(piece, media[piece].pop(0)))
        elif piece:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}


def _part(kind: str, item: Any) -> Message:
    """Return an item as a message part; a part (with bounds on its pixels, say) is returned unchanged."""
    if not isinstance(item, dict):
        return {"type": kind, kind: item}
    return item if "type" in item else {"type": kind, **item}


def read_pictures(messages: Any, keys: Mapping[str, str], where: object) -> dict[str, list[Any]] | None:
    """Return the pictures of a conversation in the form that processors take; None: it has none."""
    if not isinstance(messages, list):
        raise ValueError(f"{where}: a model with a processor needs the prompt as a list of messages.")
    folder = Path(where.path).parent if isinstance(where, Place) else None
    images: list[Any] = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _IMAGE_PARTS or (kind == _VIDEO and _VIDEO in keys):
                column = keys.get(_VIDEO if kind == _VIDEO else _IMAGE)
                try:
                    images.append(open_media(part, folder=folder))
                except NotAnImage as error:
                    what = f"{kind if kind == _VIDEO else _IMAGE} {len(images) + 1}"
                    raise ValueError(
                        f"{where}: {what} of column {column!r} (--multimodal-keys): {error}."
                    ) from error
            elif kind in (_VIDEO, "audio"):
                raise ValueError(
                    f"{where}: the prompt holds a part of type {kind!r}; models are trained on pictures, "
                    "videos of a column in --multimodal-keys, and text."
                )
    return {"images": images} if images else None


def bare_messages(messages: list[Message]) -> list[Message]:
    """Return the messages without pixels: chat templates only need to see where images are."""

    def bare(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        return {"type": "image"} if kind in _IMAGE_PARTS else {"type": _VIDEO} if kind == _VIDEO else part

    return [
        {**message, "content": [bare(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
