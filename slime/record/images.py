"""Stores small re-encoded copies of the images of samples: no original byte is kept."""

import base64
import contextlib
import io
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from slime.utils.media.pictures import Video, picture_bytes
from slime.utils.types import Sample

_SIDE, _PIXELS = 512, 1 << 14  # longest side of a copy; images of at most so many pixels keep their size
_MOST, _MOST_BYTES = 16, 1 << 19  # images of a sample; bytes of one
_KINDS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}  # by the first bytes


def images_of_group(samples: Sequence[Sample]) -> Iterator[tuple[int, int, bytes]]:
    """Yield (sample, place, copy) of each image; samples with the same images as the one before are skipped.

    An empty copy: the sample has no image, or one that cannot be read.
    """
    before: list[int] = []
    for member, sample in enumerate(samples):
        inputs = sample.multimodal_inputs
        shown = list((inputs.get("images") or ()) if isinstance(inputs, dict) else ())[:_MOST]
        if before != (before := list(map(id, shown))):
            yield from ((member, place, _copy(picture)) for place, picture in enumerate(shown or [None]))


def _copy(picture: Any) -> bytes:
    with contextlib.suppress(Exception):  # a user's function may put anything there
        from PIL import Image  # only runs with images need it

        # Its own reader of the bytes: another thread may be decoding the picture itself.
        first = picture.frames[0] if isinstance(picture, Video) else picture
        copy, file = Image.open(io.BytesIO(picture_bytes(first))).convert("RGB"), io.BytesIO()
        copy.thumbnail((_SIDE, _SIDE))
        copy.save(file, "PNG" if copy.width * copy.height <= _PIXELS else "JPEG")
        return file.getvalue()
    return b""


def read_images(connection: sqlite3.Connection, group_row: int, row: int) -> list[str | None]:
    """Return the images of a sample as data URLs; None: one that cannot be shown."""
    query = (
        "SELECT CAST(data AS BLOB) FROM images WHERE group_row = ?1 AND member = (SELECT max(member) "
        "FROM images WHERE group_row = ?1 AND member <= (SELECT count(*) FROM samples WHERE group_row = ?1 "
        "AND id < ?2)) ORDER BY place"
    )
    with contextlib.suppress(sqlite3.OperationalError):  # an older version wrote the record
        found = [data for (data,) in connection.execute(query, (group_row, row))]
        return [_data_url(data) for data in found if found != [b""]]
    return []


def _data_url(data: bytes) -> str | None:
    """Return the data URL of an image that a browser may show: a PNG or JPEG that is not too large."""
    kind = next((kind for head, kind in _KINDS.items() if data.startswith(head)), None)
    is_shown = kind is not None and len(data) <= _MOST_BYTES
    return f"data:{kind};base64,{base64.b64encode(data).decode()}" if is_shown else None
