"""The HTTP session of a simulated run: requests of the real client reach modelled servers."""

from __future__ import annotations

import asyncio
import functools
import json as json_text
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any

from slime.utils.http_utils import HttpError

Server = Callable[[str, str, Any, Mapping[str, str]], Awaitable[Any]]  # method, path, payload, headers


class ModelledSession:
    """Replaces aiohttp's session on the simulated loop: a request reaches a model, not a socket."""

    closed = False

    def __init__(self, servers: Mapping[str, Server]):
        self._servers = servers  # by origin: http://name:port

    def request(
        self, method: str, url: str, *, json: Any = None, headers: Mapping[str, str], timeout: Any = None
    ) -> _ModelledRequest:
        scheme, _, host, path = url.split("/", 3)
        call = functools.partial(self._servers[f"{scheme}//{host}"], method, path, json, headers)
        return _ModelledRequest(call, url, timeout.total if timeout else None)

    def post(self, url: str, *, json: Any, headers: Mapping[str, str]) -> _ModelledRequest:
        return self.request("POST", url, json=json, headers=headers)

    async def close(self) -> None: ...


class _ModelledRequest:
    """Can be awaited or entered, like a request of aiohttp."""

    def __init__(self, call: Callable[[], Awaitable[Any]], url: str, timeout_s: float | None):
        self._call, self._url, self._timeout_s = call, url, timeout_s

    async def _send(self) -> _ModelledResponse:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._call()
        except HttpError as error:
            return _ModelledResponse(self._url, error.status, error.body.encode())
        return _ModelledResponse(self._url, 200, b"" if answer is None else json_text.dumps(answer).encode())

    def __await__(self) -> Generator[Any, None, _ModelledResponse]:
        return self._send().__await__()

    async def __aenter__(self) -> _ModelledResponse:
        return await self._send()

    async def __aexit__(self, *_: object) -> None: ...


class _ModelledResponse:
    """An HTTP response with a complete body."""

    def __init__(self, url: str, status: int, body: bytes):
        self.url, self.status, self.headers, self._body = url, status, dict[str, str](), body

    async def read(self) -> bytes:
        return self._body

    async def text(self, errors: str = "strict") -> str:
        return self._body.decode(errors=errors)

    async def __aenter__(self) -> _ModelledResponse:
        return self

    async def __aexit__(self, *_: object) -> None: ...
