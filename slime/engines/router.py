"""A minimal balancer for installs without SGLang's router: the engine with the fewest requests in flight is next.

It runs on the loop of the process that owns the engines. A session key pins a conversation to one engine, whose
prefix cache knows it. A request whose engine breaks is sent to another one; it has no control endpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
from aiohttp import web

from slime.utils.http_utils import get_session

SESSION_HEADER = "X-SMG-Routing-Key"
_MAX_BODY_BYTES = 256 * 1024**2
_HOP_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding", "keep-alive"})


class Balancer:
    """Forwards `/generate` and the OpenAI-style endpoints to one of the engines."""

    def __init__(self, urls: Sequence[str]):
        self._in_flight: dict[str, int] = dict.fromkeys(urls, 0)
        self._session_home: dict[str, str] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Serves; returns the port that was bound."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/workers", self._workers)
        app.router.add_get("/health", self._health)
        app.router.add_post("/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _choose(self, session: str | None, tried: set[str]) -> str | None:
        left = {url: count for url, count in self._in_flight.items() if url not in tried}
        if not left:
            return None
        home = self._session_home.get(session) if session else None
        url = home if home in left else min(left, key=left.__getitem__)
        if session:
            self._session_home[session] = url
        return url

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_HEADERS}
        tried: set[str] = set()
        while (url := self._choose(request.headers.get(SESSION_HEADER), tried)) is not None:
            tried.add(url)
            self._in_flight[url] += 1
            try:
                return await self._send(request, url, body, headers)
            except (TimeoutError, aiohttp.ClientConnectionError):
                continue  # this engine is down: another one may serve
            finally:
                self._in_flight[url] -= 1
        return web.json_response({"error": "no engine answers"}, status=503)

    async def _send(self, request: web.Request, url: str, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        target = f"{url}/{request.match_info['path']}"
        async with get_session().post(target, data=body, headers=headers) as answer:
            kind = answer.headers.get("Content-Type", "application/json")
            if "event-stream" not in kind:
                return web.Response(body=await answer.read(), status=answer.status, headers={"Content-Type": kind})
            stream = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
            await stream.prepare(request)
            async for chunk in answer.content.iter_any():
                await stream.write(chunk)
            await stream.write_eof()
            return stream

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": url, "url": url} for url in self._in_flight]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()
