"""Reads request bodies: JSON, manifests and tags; invalid ones raise BadRequest with the reason."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from slime.engines.embedded.generate_json import BadRequest
from slime.wire.control import TAGS
from slime.wire.manifest import WeightManifest
from slime.wire.protocol import shown

MAX_BODY_BYTES = 32 << 20  # JSON is read in one go, and nobody else is served meanwhile: a second at most
_BODY_DEADLINE_S = 120.0


async def read_json(request: web.Request) -> dict[str, Any]:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise web.HTTPUnsupportedMediaType(
            text="compressed bodies are not taken: a small one may unfold to any size\n"
        )
    try:
        async with asyncio.timeout(_BODY_DEADLINE_S):
            raw = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {_BODY_DEADLINE_S:g} s\n") from None
    try:
        body = json.loads(raw or b"{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {shown(str(error))}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def text_of(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} is {shown(value)}: expected a string that is not empty")
    return value


async def read_manifest(data: Any) -> WeightManifest:
    """Read on another thread: that of a large model has tens of thousands of entries."""
    try:
        return await asyncio.to_thread(WeightManifest.from_json, data)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def read_tags(body: Mapping[str, Any]) -> list[str]:
    tags = list(TAGS) if body.get("tags") is None else body["tags"]
    if not isinstance(tags, list) or any(tag not in TAGS for tag in tags):
        raise BadRequest(f"tags is {shown(tags)}: expected a list out of {TAGS}")
    return tags
