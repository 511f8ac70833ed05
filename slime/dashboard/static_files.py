"""The dashboard's static files, kept in memory with a compressed copy."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

FOLDER = Path(__file__).parent / "static"


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    packed: bytes
    kind: str
    tag: str


def load_static() -> dict[str, StaticFile]:
    """Return the static files by URL path; `/` is index.html."""
    found = {}
    for file in sorted(FOLDER.rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            kind = mimetypes.guess_type(file.name)[0] or "text/plain"
            kind = "text/javascript" if file.suffix == ".js" else kind
            tag = f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'
            packed = gzip.compress(content, 6, mtime=0)
            found["/" + file.relative_to(FOLDER).as_posix()] = StaticFile(content, packed, kind, tag)
    found["/"] = found["/index.html"]
    return found


def respond(request: web.Request, file: StaticFile) -> web.Response:
    # A browser asks for the icon at every change of the address; the rest may change with the next version.
    keeps = "max-age=86400" if file.kind.startswith("image/") else "no-cache"
    headers = {"ETag": file.tag, "Cache-Control": keeps}
    if request.headers.get("If-None-Match") == file.tag:
        return web.Response(status=304, headers=headers)
    content = file.content
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        content, headers["Content-Encoding"] = file.packed, "gzip"
    return web.Response(body=content, headers=headers, content_type=file.kind, charset="utf-8")
