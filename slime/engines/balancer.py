"""A small load balancer for installs without SGLang's router; it picks the engine with the fewest requests.

It runs on the event loop of the process that owns the engines. A session key pins a conversation to the
engine whose prefix cache holds it. A request whose engine refuses the connection, responds with 5xx or leaves
the rotation is sent to another engine; if none is left it waits. Only endpoints that generate are forwarded,
not endpoints that control an engine.

A request may be the cause when its engine crashes, so it goes back to that engine after the restart, and to
another one only if the engine stays down for long. A request during which an engine crashes a second time is
given up.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from slime.arguments import Args, PluginArgs
from slime.catalog.deadlines import timeout_s
from slime.engines.fleet import FleetServer
from slime.engines.middleware import Middleware, RouterAnswer, RouterRequest, chain
from slime.utils.async_utils import run
from slime.utils.browser_guard import browser_guard, names_of_this_machine
from slime.utils.http_utils import ANSWERED_BY, get_session, with_token
from slime.utils.machine.open_files import raise_limit
from slime.utils.misc import load_function
from slime.wire.client import SESSION_HEADER

logger = logging.getLogger(__name__)

Address = tuple[str, int]  # host and port

# Endpoints that are forwarded. Only owners may change an engine (pause, weights, memory, profiles).
ENDPOINTS = frozenset(
    (
        *("generate", "v1/completions", "v1/chat/completions", "v1/responses", "v1/messages"),
        *("v1/messages/count_tokens", "v1/embeddings", "v1/rerank", "v1/score", "v1/classify", "encode"),
        *("classify", "v1/tokenize", "v1/detokenize", "tokenize", "detokenize", "parse_function_call"),
        "separate_reasoning",
    )
)
_MAX_BODY_BYTES = 256 * 1024**2
_MAX_SESSIONS = 100_000  # the least recently used are forgotten
_ALL_REFUSED_PAUSE_S = 0.2
_DYING_PAUSE_S = 1.0  # an engine that is ending may still accept a connection for a moment
_LAST_WORDS_S = 0.05
_RETURN_PATIENCE_S = 30.0  # how long a request waits for the engine that crashed while serving it
_HOP_HEADERS = frozenset(
    {"host", "content-length", "connection", "transfer-encoding", "keep-alive", "expect", "origin"}
)
# The engine is down. A generation has no side effects, so it may be sent again, to this engine or another.
_BROKEN = (TimeoutError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
_NOT_REACHED = aiohttp.ClientConnectorError  # the engine has not received the request


@dataclass(frozen=True, slots=True)
class _Answer:
    """A complete HTTP response of an engine."""

    status: int
    body: bytes
    kind: str = "application/json"
    url: str = ""

    @classmethod
    def error(cls, status: int, message: str) -> _Answer:
        return cls(status, json.dumps({"error": message}).encode())


_Told = _Answer | web.StreamResponse
# Forwards the response that the engine at this address has started.
_Delivery = Callable[[str, aiohttp.ClientResponse], Awaitable[_Told]]


@dataclass(frozen=True, slots=True)
class _ForwardedRequest:
    """One forwarded request. `deadline`: when a wait for an engine ends."""

    path: str
    body: bytes
    headers: dict[str, str]
    deliver: _Delivery
    deadline: float


class _EngineCrashed(Exception):
    """The engine crashed after it had received the request."""


class Balancer:
    """Forwards `/generate` and the OpenAI-style endpoints to one of the engines.

    `no_engine_timeout_s`: how long a request waits without an engine in rotation, or without a reply, before
    status 503.
    """

    def __init__(
        self, urls: Sequence[str], *, no_engine_timeout_s: float = 0.0, middlewares: Sequence[Middleware] = ()
    ):
        # The requests at each engine; they end with their responses, or earlier when the engine leaves.
        self._running: dict[str, set[asyncio.Timeout]] = {url: set() for url in urls}
        self._followers: list[Callable[[], None]] = []
        self._session_home: OrderedDict[str, str] = OrderedDict()
        self._no_engine_timeout_s = no_engine_timeout_s
        self._middlewares = tuple(middlewares)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Start serving; return the port."""
        raise_limit()
        guard = browser_guard(known=names_of_this_machine([host]))
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[guard])
        app.router.add_get("/workers", self._workers)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._handle)
        # A client that disconnects cancels its handler, which ends the request at the engine.
        self._runner = web.AppRunner(app, access_log=None, auto_decompress=False, handler_cancellation=True)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise ValueError(
                f"--sglang-router-port is {port}: it cannot be bound ({error.strerror}); choose another, or "
                "leave it out."
            ) from None
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- who is in rotation; called from any thread but the loop's -----------------------------------------

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of the engines in rotation."""
        return tuple(self._running)

    def follow(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each change of `urls`."""
        self._followers.append(changed)

    def add(self, server: FleetServer) -> None:
        self._change(self._add(server.url))

    def remove(self, url: str) -> None:
        """Remove an engine at once; its requests are sent to other engines."""
        self._change(self._remove(url))

    def keep(self, urls: Sequence[str]) -> None:
        """Let these engines, and no others, be in rotation."""
        self._change(*map(self._add, urls), *map(self._remove, set(self.urls) - set(urls)))

    def _change(self, *changes: Coroutine[Any, Any, None]) -> None:
        for change in changes:
            run(change)
        for changed in self._followers:
            changed()

    async def _add(self, url: str) -> None:
        self._running.setdefault(url, set())

    async def _remove(self, url: str) -> None:
        running = self._running.pop(url, set())
        if running:
            # If its process is dead, its connections have ended; let them fail, because a crash is not the
            # same as leaving.
            await asyncio.sleep(_LAST_WORDS_S)
        for visit in list(running):
            visit.reschedule(0.0)  # expired: at once

    # ---- one request ---------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise web.HTTPUnsupportedMediaType(text="compressed bodies are not accepted\n")
        body, path = await request.read(), request.match_info["path"]
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_HEADERS}
        payload = _json_object(body) if self._middlewares else None
        if payload is None or payload.get("stream"):
            deliver = functools.partial(_pass_on, request)
            reply = await self._send_somewhere(path, body, headers, deliver)
            if isinstance(reply, web.StreamResponse):
                return reply
            headers = {"Content-Type": reply.kind, **_signed(reply.url)}
            return web.Response(body=reply.body, status=reply.status, headers=headers)
        routed = await chain(self._middlewares, self._forward)(RouterRequest(f"/{path}", payload, headers))
        return web.json_response(routed.payload, status=routed.status)

    async def _forward(self, request: RouterRequest) -> RouterAnswer:
        """Send a request to an engine; the innermost middleware calls this."""
        body = json.dumps(request.payload).encode()
        headers = {**request.headers, "Content-Type": "application/json"}
        answer = await self._send_somewhere(request.path.lstrip("/"), body, headers, _read)
        assert isinstance(answer, _Answer), "no client reads this response as a stream"
        try:
            return RouterAnswer(answer.status, json.loads(answer.body))
        except ValueError:
            return RouterAnswer(answer.status, {"error": answer.body.decode(errors="replace")})

    async def _send_somewhere(
        self, path: str, body: bytes, headers: dict[str, str], deliver: _Delivery
    ) -> _Told:
        if path not in ENDPOINTS:
            return _Answer.error(404, f"/{path[:100]} is not forwarded to engines; /generate is, for example")
        forwarded = _ForwardedRequest(
            path, body, headers, deliver, time.monotonic() + self._no_engine_timeout_s
        )
        session, tried = headers.get(SESSION_HEADER), set[str]()
        failed: _Answer | None = None
        is_suspect = False
        while True:
            url = self._choose(session, tried)
            if url is None:
                if failed is not None:
                    return failed  # all engines fail: the client backs off
                if time.monotonic() >= forwarded.deadline:
                    return _Answer.error(503, "no engine answers")
                tried.clear()
                await asyncio.sleep(_ALL_REFUSED_PAUSE_S)
                continue
            tried.add(url)
            try:
                answer = await self._try(url, forwarded)
            except _EngineCrashed:
                answer = _given_up(url) if is_suspect else await self._send_back(url, forwarded)
                is_suspect = True
            if isinstance(answer, _Answer) and answer.status >= 500:
                # A failing engine responds fast, so it would always be the least busy one and get every
                # request.
                failed = answer
            elif answer is not None:
                return answer

    async def _send_back(self, url: str, forwarded: _ForwardedRequest) -> _Told | None:
        """Send a request again to the engine that crashed under it. None: it is still down; try another."""
        patience = min(forwarded.deadline, time.monotonic() + _RETURN_PATIENCE_S)
        await asyncio.sleep(_DYING_PAUSE_S)
        while True:
            try:
                answer = await self._try(url, forwarded) if url in self._running else None
            except _EngineCrashed:
                return _given_up(url)
            if answer is not None and not (isinstance(answer, _Answer) and answer.status >= 500):
                return answer
            if time.monotonic() >= patience:
                return None
            await asyncio.sleep(_ALL_REFUSED_PAUSE_S)

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

    async def _try(self, url: str, forwarded: _ForwardedRequest) -> _Told | None:
        """Send a request to one engine; None if it was not reached, or left before it responded."""
        running, visit = self._running[url], asyncio.timeout(None)
        running.add(visit)
        target = f"{url}/{forwarded.path}"
        try:
            async with visit:
                headers = with_token(target, forwarded.headers)
                response = await get_session().post(target, data=forwarded.body, headers=headers)
                return await forwarded.deliver(url, response)
        except _NOT_REACHED:
            return None
        except _BROKEN as error:
            if visit.expired():
                return None
            logger.debug("engine %s crashed during a request (%s: %s)", url, type(error).__name__, error)
            raise _EngineCrashed from error
        finally:
            running.discard(visit)

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": url, "url": url} for url in self._running]})

    async def _models(self, request: web.Request) -> web.Response:
        """Return the models of the first engine that responds; all engines serve the same."""
        for url in list(self._running):
            target = f"{url}/v1/models"
            try:
                async with get_session().get(target, headers=with_token(target, {})) as response:
                    return web.Response(
                        body=await response.read(), status=response.status, content_type=response.content_type
                    )
            except _BROKEN:
                continue
        return web.json_response({"error": {"message": "no engine answers"}}, status=503)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()


# ---- deliveries --------------------------------------------------------------------------------------------


async def _read(url: str, response: aiohttp.ClientResponse) -> _Answer:
    async with response:
        kind = response.headers.get("Content-Type", "application/json")
        return _Answer(response.status, await response.read(), kind, url)


async def _pass_on(request: web.Request, url: str, response: aiohttp.ClientResponse) -> _Told:
    """Forward a stream to the client piece by piece."""
    kind = response.headers.get("Content-Type", "")
    if "event-stream" not in kind:
        return await _read(url, response)
    stream = web.StreamResponse(status=response.status, headers={"Content-Type": kind, **_signed(url)})
    async with response:
        try:
            await _to_client(stream.prepare(request))
            async for chunk in response.content.iter_any():
                await _to_client(stream.write(chunk))
            await _to_client(stream.write_eof())
        except _ClientLeft as left:  # the client is gone, and the engine is not the cause
            logger.debug("a client of %s left before the end of its stream: %s", url, left)
        except (*_BROKEN, asyncio.CancelledError) as error:
            # A client that has read a part cannot be served by another engine: its stream ends early.
            logger.info("%s crashed in the middle of a stream (%s)", url, error or type(error).__name__)
            if request.transport is not None:
                request.transport.abort()
    return stream


class _ClientLeft(Exception):
    """The client has closed its connection."""


async def _to_client(write: Awaitable[object]) -> None:
    try:
        await write
    except ConnectionError as error:  # closed, closing, or lost with a full buffer
        raise _ClientLeft(str(error) or type(error).__name__) from error


def _signed(url: str) -> dict[str, str]:
    """Return headers that name the engine for the client; empty: no engine."""
    return {ANSWERED_BY: url} if url else {}


def _given_up(url: str) -> _Answer:
    """Return a 4xx, so that the client does not send the request again and crash the next engine."""
    message = f"engine {url} crashed on this request, so it is not sent to another one; see the engine's log"
    logger.error("A request is given up: %s", message)
    return _Answer.error(422, message)


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return payload if isinstance(payload, dict) else None


def make_balancer(args: Args, seen: PluginArgs, urls: Sequence[str]) -> Balancer:
    """Return slime's load balancer for these engines. `seen`: what middlewares get."""
    return Balancer(
        urls,
        no_engine_timeout_s=timeout_s(args, "no-engine"),
        middlewares=[load_function(path)(seen) for path in args.router_middleware_paths],
    )
