"""A minimal balancer for installs without SGLang's router: the engine with the fewest requests in flight is next.

It runs on the loop of the process that owns the engines. A session key pins a conversation to one engine, whose
prefix cache knows it. A request whose engine breaks, answers 5xx or is taken out of rotation is sent to another one; with
none left it waits. It has no control endpoints.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Sequence

import aiohttp
from aiohttp import web

from slime.engines.fleet import Server
from slime.engines.middleware import Middleware, RouterAnswer, RouterRequest, chain
from slime.utils.async_utils import run
from slime.utils.http_utils import get_session

SESSION_HEADER = "X-SMG-Routing-Key"
_MAX_BODY_BYTES = 256 * 1024**2
_MAX_SESSIONS = 100_000  # the longest unused ones are forgotten
_ALL_REFUSED_PAUSE_S = 0.2
_HOP_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding", "keep-alive"})
# This engine is down: another one may serve. A generation has no side effect, so it may be sent again.
_BROKEN = (TimeoutError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)


class _Answer:
    """A whole answer of an engine."""

    __slots__ = ("body", "kind", "status")

    def __init__(self, status: int, body: bytes, kind: str = "application/json"):
        self.status, self.body, self.kind = status, body, kind


class Balancer:
    """Forwards `/generate` and the OpenAI-style endpoints to one of the engines.

    `no_engine_timeout_s`: how long a request waits while no engine is in rotation, or none answers, before it is a 503.
    """

    def __init__(
        self, urls: Sequence[str], *, no_engine_timeout_s: float = 0.0, middlewares: Sequence[Middleware] = ()
    ):
        self._running: dict[str, set[asyncio.Task]] = {url: set() for url in urls}
        self._session_home: OrderedDict[str, str] = OrderedDict()
        self._no_engine_timeout_s = no_engine_timeout_s
        self._middlewares = tuple(middlewares)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Serves; returns the port that was bound."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/workers", self._workers)
        app.router.add_get("/health", self._health)
        app.router.add_post("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise ValueError(
                f"--sglang-router-port is {port}: it cannot be bound ({error.strerror}); choose another, or leave it out."
            ) from None
        return self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- who is in rotation; called from any thread but the loop's -----------------------------------------------

    def add(self, server: Server) -> None:
        run(self._add(server.url))

    def remove(self, url: str) -> None:
        """Out at once; what it was working on goes to others."""
        run(self._remove(url))

    async def _add(self, url: str) -> None:
        self._running.setdefault(url, set())

    async def _remove(self, url: str) -> None:
        for task in self._running.pop(url, ()):
            task.cancel()

    # ---- one request ---------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body, path = await request.read(), request.match_info["path"]
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_HEADERS}
        payload = _json_object(body) if self._middlewares else None
        if payload is None or payload.get("stream"):
            answer = await self._send_somewhere(path, body, headers, request)
            if isinstance(answer, web.StreamResponse):
                return answer
            return web.Response(body=answer.body, status=answer.status, headers={"Content-Type": answer.kind})
        answer = await chain(self._middlewares, self._forward)(RouterRequest(f"/{path}", payload, headers))
        return web.json_response(answer.payload, status=answer.status)

    async def _forward(self, request: RouterRequest) -> RouterAnswer:
        """What the innermost middleware calls."""
        body = json.dumps(request.payload).encode()
        headers = {**request.headers, "Content-Type": "application/json"}
        answer = await self._send_somewhere(request.path.lstrip("/"), body, headers, None)
        try:
            return RouterAnswer(answer.status, json.loads(answer.body))
        except ValueError:
            return RouterAnswer(answer.status, {"error": answer.body.decode(errors="replace")})

    async def _send_somewhere(
        self, path: str, body: bytes, headers: dict[str, str], request: web.Request | None
    ) -> _Answer | web.StreamResponse:
        deadline = time.monotonic() + self._no_engine_timeout_s
        session, tried = headers.get(SESSION_HEADER), set()
        failed: _Answer | None = None
        while True:
            url = self._choose(session, tried)
            if url is None:
                if failed is not None:
                    return failed  # whoever is there fails: the client backs off
                if time.monotonic() >= deadline:
                    return _Answer(503, b'{"error": "no engine answers"}')
                tried.clear()
                await asyncio.sleep(_ALL_REFUSED_PAUSE_S)
                continue
            tried.add(url)
            answer = await self._try(url, path, body, headers, request)
            if isinstance(answer, _Answer) and answer.status >= 500:
                # A sick engine fails fast, so it would always be the least busy one and draw every request.
                failed = answer
            elif answer is not None:
                return answer

    def _choose(self, session: str | None, tried: set[str]) -> str | None:
        left = {url: len(tasks) for url, tasks in self._running.items() if url not in tried}
        if not left:
            return None
        home = self._session_home.get(session) if session else None
        url = home if home in left else min(left, key=left.__getitem__)
        if session:
            self._session_home[session] = url
            self._session_home.move_to_end(session)
            if len(self._session_home) > _MAX_SESSIONS:
                self._session_home.popitem(last=False)
        return url

    async def _try(
        self, url: str, path: str, body: bytes, headers: dict[str, str], request: web.Request | None
    ) -> _Answer | web.StreamResponse | None:
        """None: this engine broke, or left, before it answered."""
        running = self._running[url]
        task = asyncio.ensure_future(self._send(f"{url}/{path}", body, headers, request))
        running.add(task)
        try:
            return await asyncio.shield(task)
        except _BROKEN:
            return None
        except asyncio.CancelledError:
            if task.cancelled() and self._running.get(url) is not running:
                return None  # taken out of rotation
            task.cancel()
            raise
        finally:
            running.discard(task)

    async def _send(
        self, target: str, body: bytes, headers: dict[str, str], request: web.Request | None
    ) -> _Answer | web.StreamResponse:
        async with get_session().post(target, data=body, headers=headers) as answer:
            kind = answer.headers.get("Content-Type", "application/json")
            if "event-stream" not in kind or request is None:
                return _Answer(answer.status, await answer.read(), kind)
            stream = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
            await stream.prepare(request)
            try:
                async for chunk in answer.content.iter_any():
                    await stream.write(chunk)
            except (
                *_BROKEN,
                asyncio.CancelledError,
            ) as error:  # the client has read a part, so nobody else can begin again
                raise ConnectionResetError(f"{target} broke in the middle of a stream") from error
            await stream.write_eof()
            return stream

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": url, "url": url} for url in self._running]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()


def _json_object(body: bytes) -> dict | None:
    try:
        payload = json.loads(body)
    except ValueError:
        return None
    return payload if isinstance(payload, dict) else None
