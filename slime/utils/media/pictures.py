"""Reads a picture from any form that a prompt file or tool uses: path, bytes, data URL, address, PIL."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname, urlopen

if TYPE_CHECKING:
    from PIL.Image import Image

_FETCH_TIMEOUT_S = 30.0
_SOURCE = "slime_source"  # attribute of a picture: the bytes that it was read from
# Where a part of a message keeps its picture; the first that is there counts.
_PLACES = ("bytes", "image", "image_url", "url", "path")
_SHOWN = 80  # characters of a name in a message
_FRAMES = (
    "a video is given as pictures of equal size in their order, such as the files of `ffmpeg -i clip.mp4 -vf "
    "fps=2 frame-%04d.png`"
)
_FPS = 2.0  # frames per second of a video that does not say it


class NotAnImage(ValueError):
    """The given value cannot be read as a picture; the message says why."""


@dataclass(frozen=True, eq=False, slots=True)
class Video:
    """The frames of a video. It may be wherever a picture may be."""

    frames: tuple[Any, ...]  # pictures
    fps: float = _FPS


def open_media(item: Any, *, folder: Path | None = None) -> Any:
    """Open a picture, or a video: {"type": "video", "video": frames, "fps": frames per second}."""
    if isinstance(item, Video):
        return item
    if not isinstance(item, Mapping) or item.get("type") != "video":
        return open_picture(item, folder=folder)
    frames: Any = item.get("video")
    fps = item.get("fps") or _FPS
    if hasattr(frames, "tolist") and not isinstance(frames, (bytes, bytearray, memoryview)):
        frames = frames.tolist()  # an array, as parquet gives it
    if not isinstance(frames, (list, tuple)) or not frames:
        raise NotAnImage(f"{_short(repr(frames))} is no list of frames: {_FRAMES}")
    if not isinstance(fps, (int, float)) or fps <= 0:
        raise NotAnImage(f"fps of a video is {fps!r}: it must be a positive number of frames per second")
    bounds = {name: item[name] for name in ("min_pixels", "max_pixels") if item.get(name) is not None}
    try:
        opened = [open_picture({"image": f} | bounds if bounds else f, folder=folder) for f in frames]
    except NotAnImage as error:
        raise NotAnImage(f"a frame of a video: {error}; {_FRAMES}") from None
    return Video(tuple(opened), float(fps))


def open_picture(item: Any, *, folder: Path | None = None) -> Image:
    """Open a picture; it is decoded when its pixels are first needed.

    `folder`: where a relative path is searched if it is not below the working directory. An object with
    `min_pixels` or `max_pixels` is scaled to these bounds of width times height.
    """
    if isinstance(item, Mapping):
        return _open_part(item, folder)
    if isinstance(item, (bytes, bytearray, memoryview)):
        return _decode(bytes(item), f"{len(item)} bytes")
    if isinstance(item, str):
        return _decode(_read(item, folder), _short(item))
    if isinstance(item, Path):
        return open_picture(str(item), folder=folder)
    if _is_picture(item):
        return item
    raise NotAnImage(
        f"{type(item).__name__} {_short(repr(item))} is not a picture: give a path, bytes, an object with "
        "bytes or path, a data URL or an address"
    )


def _open_part(part: Mapping[str, Any], folder: Path | None) -> Image:
    place = next((name for name in _PLACES if part.get(name) is not None), None)
    if place is None:
        raise NotAnImage(f"an object with {sorted(part)} holds no picture: it needs one of {list(_PLACES)}")
    picture = open_picture(part[place], folder=folder)
    bounds = [part.get(name) for name in ("min_pixels", "max_pixels")]
    return picture if bounds == [None, None] else fit_pixels(picture, *bounds)


def _read(text: str, folder: Path | None) -> bytes:
    if text.startswith("data:"):
        return _read_data_url(text)
    kind = urlsplit(text).scheme.lower() if "://" in text else ""
    if kind in ("http", "https"):
        return _fetch(text)
    if kind == "file":
        return _read_file(Path(url2pathname(urlsplit(text).path)), None)
    if kind:
        raise NotAnImage(f"{_short(text)}: {kind}:// is not read; use http, https, file or a path")
    return _read_file(Path(text).expanduser(), folder)


def _read_file(path: Path, folder: Path | None) -> bytes:
    if folder is not None and not path.is_absolute() and not path.is_file():
        path = folder / path
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise NotAnImage(f"the file {_short(str(path))} {reason}") from None


def _read_data_url(text: str) -> bytes:
    head, found, body = text.partition(",")
    if not found:
        raise NotAnImage("a data URL without a comma: it looks like data:image/png;base64,...")
    try:
        if head.endswith(";base64"):
            return base64.b64decode(body, validate=True)
        return unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise NotAnImage(f"a data URL whose base64 is damaged ({error})") from None


def _fetch(address: str) -> bytes:
    try:
        with urlopen(address, timeout=_FETCH_TIMEOUT_S) as answer:
            raw: bytes = answer.read()
            return raw
    except (OSError, ValueError) as error:
        raise NotAnImage(f"{_short(address)} cannot be fetched ({error})") from None


def _decode(raw: bytes, name: str) -> Image:
    from PIL import Image, UnidentifiedImageError  # only rows with pictures need it

    if not raw:
        raise NotAnImage(f"{name} is empty")
    try:
        with Image.open(io.BytesIO(raw)) as probe:
            probe.verify()
        picture = Image.open(io.BytesIO(raw))
    except UnidentifiedImageError:
        raise NotAnImage(f"{name} is not a picture of a known kind (it begins with {raw[:8]!r})") from None
    except Exception as error:  # damaged bytes make decoders raise errors of any kind
        raise NotAnImage(f"{name} is a damaged picture ({error})") from None
    setattr(picture, _SOURCE, raw)
    return picture


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def fit_pixels(picture: Image, min_pixels: int | None, max_pixels: int | None) -> Image:
    """Scale a picture so that width times height lies between the bounds; None: no bound."""
    for name, bound in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
        if bound is not None and (not isinstance(bound, int) or bound < 1):
            raise NotAnImage(f"{name} is {bound!r}: it must be a whole number of at least 1")
    width, height = picture.size
    pixels = width * height
    if max_pixels is not None and pixels > max_pixels:
        factor = math.sqrt(max_pixels / pixels)
        return to_rgb(picture).resize((max(1, int(width * factor)), max(1, int(height * factor))))
    if min_pixels is not None and pixels < min_pixels:
        factor = math.sqrt(min_pixels / pixels)
        return to_rgb(picture).resize((math.ceil(width * factor), math.ceil(height * factor)))
    return picture


def to_rgb(picture: Image) -> Image:
    """Decode a picture to three channels; transparent pixels show their colour."""
    try:
        picture.load()
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    except Exception as error:  # as in `_decode`
        raise NotAnImage(f"the picture's pixels cannot be decoded ({error})") from None


def picture_key(picture: Image | Video) -> str:
    """Return a hash of size and pixels; pictures with equal hashes are equal to a model."""
    if isinstance(picture, Video):
        whole = repr((picture.fps, [picture_key(frame) for frame in picture.frames]))
        return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
    rgb = to_rgb(picture)
    return hashlib.blake2b(repr(rgb.size).encode() + rgb.tobytes(), digest_size=16).hexdigest()


def picture_bytes(picture: Image) -> bytes:
    """Return the bytes of the file that it was read from, or a PNG."""
    source: bytes | None = getattr(picture, _SOURCE, None)
    return source if source is not None else _png(picture)


def picture_url(picture: Image) -> str:
    """Return a lossless PNG data URL."""
    return "data:image/png;base64," + base64.b64encode(_png(to_rgb(picture))).decode("ascii")


def media_url(item: Image | Video) -> str | dict[str, Any]:
    """Return a picture's data URL; of a video, the part of a message with those of its frames."""
    if not isinstance(item, Video):
        return picture_url(item)
    return {"type": "video", "video": [picture_url(frame) for frame in item.frames], "fps": item.fps}


def _png(picture: Image) -> bytes:
    buffer = io.BytesIO()
    kept = picture if picture.mode in ("RGB", "RGBA", "L") else to_rgb(picture)
    kept.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def to_plain(inputs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `Sample.multimodal_inputs` with pictures as bytes; other values stay."""
    if inputs is None or not isinstance(inputs.get("images"), (list, tuple)):
        return inputs
    return {**inputs, "images": [_plain_item(item) for item in inputs["images"]]}


def _plain_item(item: Any) -> Any:
    if isinstance(item, Video):
        return {"type": "video", "video": [_plain_item(frame) for frame in item.frames], "fps": item.fps}
    return {"bytes": picture_bytes(item), "path": None} if _is_picture(item) else item


def _is_picture(item: Any) -> bool:
    return hasattr(item, "convert") and hasattr(item, "mode")


def from_plain(inputs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Invert `to_plain`."""
    if inputs is None or not isinstance(inputs.get("images"), (list, tuple)):
        return inputs
    pictures = [
        open_media(item) if isinstance(item, dict) and (item.get("bytes") or item.get("video")) else item
        for item in inputs["images"]
    ]
    return {**inputs, "images": pictures}
