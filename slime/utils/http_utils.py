"""HTTP for rollout code: one session per event loop, retries where they help, errors that say what happened.

A 4xx is the caller's mistake and is raised at once; 5xx, refused and broken
connections are retried with back-off, because an engine that died is being
restarted meanwhile. A 500 is the word of a server that lives: it is retried a
few times only. Engines that ask for a token get it (`authorize`).
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import ipaddress
import json
import logging
import random
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from slime.utils.machine.open_files import most_requests, raise_limit

# Plug-ins import these names from here.
from slime.utils.machine.ports import find_available_port as find_available_port
from slime.utils.machine.ports import get_host_info as get_host_info
from slime.utils.machine.ports import is_port_available as is_port_available

CLIENT = "slime"  # how servers know requests whose sampling parameters were seen here
_MAX_CONNECTIONS = 4096
_BACKOFF_CAP_S = 5.0
_ANSWERED_RETRIES = 8  # of a request that a living server failed on, about 15 s
ANSWERED_BY = "X-Slime-Engine"  # on an answer that came through our balancer: the address of the engine
_TELL_EVERY_S = 30.0  # that requests are answered by errors
_END_S = 1.0  # at exit: for tasks to take note that they are cancelled
# Shorter than servers keep an idle connection (uvicorn: 5 s), or a call
# would meet one that is just being closed.
_LAST_BYTES_S = 1.0  # behind the last event of a stream
_KEEPALIVE_S = 2.0
# Failures of the connection itself: the request may be sent again.
_RETRYABLE = (
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,
    ConnectionError,
    asyncio.TimeoutError,
)

logger = logging.getLogger(__name__)
_told_at = -_TELL_EVERY_S
_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
    weakref.WeakKeyDictionary()
)


class Observer(Protocol):
    """Told of each POST of a task; what `sending` raises, the caller of `post` or `stream` gets."""

    def sending(self, url: str, payload: Any) -> None: ...

    def answered(self, url: str, answer: Any) -> None: ...


_observer: ContextVar[Observer | None] = ContextVar("slime_http_observer", default=None)


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Within this block, and in tasks that it starts, `observer` sees what is posted."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def is_observed() -> bool:
    """Whether somebody looks at what the running task posts."""
    return _observer.get() is not None


# Where an engine that is started reads the token it must ask for, and a run that
# of engines which somebody else started.
TOKEN_VARIABLE = "SLIME_ENGINE_TOKEN"
_tokens: dict[str, str] = {}  # by origin: http://host:port


# By origin: who answers (method, path, payload, headers) within this process instead of a server.
_inner: dict[str, Callable[[str, str, Any, Mapping[str, str]], Awaitable[Any]]] = {}


@contextlib.contextmanager
def answered_here(
    servers: Mapping[str, Callable[[str, str, Any, Mapping[str, str]], Awaitable[Any]]],
) -> Iterator[None]:
    """Within this block these origins (http://name:port) are functions of this process: modelled engines."""
    _inner.update(servers)
    try:
        yield
    finally:
        for origin in servers:
            _inner.pop(origin, None)


class Forwarder(Protocol):
    """A server of this process that sends requests on: who is on its loop need not go through its socket."""

    async def whole(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, str]:
        """Status, body and the address of the server that answered (empty: none did)."""
        ...

    async def begun(self, path: str, body: bytes, headers: dict[str, str]) -> ForwardedAnswer:
        """An answer that is read as it comes; HttpError where it is an error."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardedAnswer:
    """`engine`: its address; `over`: to be called when the answer was read, or is not wanted any more."""

    response: aiohttp.ClientResponse
    engine: str
    over: Callable[[], None]


_forwarders: dict[str, tuple[asyncio.AbstractEventLoop, Forwarder]] = {}  # by origin


def forwards_here(url: str, forwarder: Forwarder) -> None:
    """From now on requests of the running loop to that server, which is its own, go to `forwarder`."""
    _forwarders[_origin(url)] = asyncio.get_running_loop(), forwarder


def forwards_no_more(forwarder: Forwarder) -> None:
    for origin in [origin for origin, (_, one) in _forwarders.items() if one is forwarder]:
        del _forwarders[origin]


def _forwarder_of(url: str) -> Forwarder | None:
    loop, forwarder = _forwarders.get(_origin(url), (None, None)) if _forwarders else (None, None)
    return forwarder if loop is not None and loop is asyncio.get_running_loop() else None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; a name counts as reached by others."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def authorize(url: str, token: str | None) -> None:
    """From now on requests of this process to that server carry the token; None: they carry none."""
    if token is None:
        _tokens.pop(_origin(url), None)
    else:
        _tokens[_origin(url)] = token


def token_of(url: str) -> str | None:
    return _tokens.get(_origin(url))


def with_token(url: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of a request to `url`; the token of an
    engine takes the place of what a client may have sent.
    """
    token, headers = token_of(url), dict(headers or {})
    if token is not None:
        headers = {k: v for k, v in headers.items() if k.lower() != "authorization"}
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _origin(url: str) -> str:
    return "/".join(str(url).split("/", 3)[:3])


class Spelled(list[Any]):
    """A list whose JSON is known, as that of ids which are sent again and again; it is not to be changed."""

    __slots__ = ("text",)

    def __init__(self, values: Iterable[Any], text: str) -> None:
        super().__init__(values)
        self.text = text  # within the brackets


def _as_json(payload: Any) -> str:
    """What `json.dumps` would write, without writing `Spelled` lists of the payload again."""
    known = (
        [name for name, value in payload.items() if type(value) is Spelled] if type(payload) is dict else []
    )
    if not known:
        return json.dumps(payload)
    spelled = [f"{json.dumps(name)}: [{payload[name].text}]" for name in known]
    rest = json.dumps({name: value for name, value in payload.items() if name not in known})
    return "{" + ", ".join(spelled) + (", " + rest[1:] if rest != "{}" else "}")


class HttpError(RuntimeError):
    """An answer that is an error. `status` 0: no answer at all."""

    def __init__(self, status: int, body: str, url: str):
        super().__init__(f"{url} answered {status}: {body[:2000]}" if status else f"{url}: {body}")
        self.status, self.body, self.url = status, body, url


def get_session() -> aiohttp.ClientSession:
    """The session of the running loop; sockets must not be shared between loops."""
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        raise_limit()
        # One of ours may go through our balancer, which has two more; what has no place waits here.
        most = min(_MAX_CONNECTIONS, most_requests(files_each=3))
        connector = aiohttp.TCPConnector(limit=most, limit_per_host=0, keepalive_timeout=_KEEPALIVE_S)
        session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"User-Agent": CLIENT},
            json_serialize=_as_json,
        )
        _sessions[loop] = session
    return session


async def close_session() -> None:
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


@atexit.register
def _close_sessions() -> None:
    """An open session at exit would be reported as a leak."""
    for loop, session in list(_sessions.items()):
        with contextlib.suppress(Exception):
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(_end_loop(), loop).result(2 * _END_S)
            elif not loop.is_closed():
                loop.run_until_complete(session.close())


async def _end_loop() -> None:
    """Tasks first: one that tries its request again would open a new session."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # looked at, so that nobody reports it as forgotten
    await close_session()


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float | None = None,
) -> Any:
    """POST JSON and return the decoded answer (text when it is not JSON)."""
    observer = _observer.get()
    if observer is not None:
        observer.sending(url, payload)
    answer = await _request("POST", url, payload, max_retries, headers, timeout_s)
    if observer is not None:
        observer.answered(url, answer)
    return answer


async def get(
    url: str, max_retries: int = 0, headers: dict[str, str] | None = None, *, timeout_s: float | None = None
) -> Any:
    return await _request("GET", url, None, max_retries, headers, timeout_s)


async def _request(
    method: str,
    url: str,
    payload: Any,
    max_retries: int,
    headers: dict[str, str] | None,
    timeout_s: float | None,
) -> Any:
    attempt = 0
    while True:
        try:
            return await _once(method, url, payload, headers, timeout_s)
        except HttpError as error:
            allowed = min(max_retries, _ANSWERED_RETRIES) if error.status == 500 else max_retries
            if error.status < 500 or attempt >= allowed:
                raise
            _tell(error)
        except _RETRYABLE as error:
            if attempt >= max_retries:
                what = f"no answer after {attempt + 1} attempts ({type(error).__name__}: {error})"
                raise HttpError(0, what, url) from error
        attempt += 1
        await asyncio.sleep(min(0.1 * 2 ** min(attempt, 10), _BACKOFF_CAP_S) * random.uniform(0.5, 1.0))


def _tell(error: HttpError) -> None:
    """Log it, but not more than once in a while: thousands of requests may meet the same trouble."""
    global _told_at
    if (now := time.monotonic()) - _told_at >= _TELL_EVERY_S:
        _told_at = now
        logger.warning("%s; it is asked again", str(error)[:500])


async def _once(
    method: str, url: str, payload: Any, headers: dict[str, str] | None, timeout_s: float | None
) -> Any:
    if _inner and (server := _inner.get(_origin(url))) is not None:
        path = url.split("/", 3)[3] if url.count("/") > 2 else ""
        async with asyncio.timeout(timeout_s):
            return await server(method, path, payload, headers or {})
    status, body, engine = await _whole(method, url, payload, with_token(url, headers), timeout_s)
    if status >= 400:
        raise HttpError(status, body.decode(errors="replace"), url)
    try:
        return _with_engine(json.loads(body), engine) if body else None
    except ValueError:
        return body.decode(errors="replace")


async def _whole(
    method: str, url: str, payload: Any, headers: dict[str, str], timeout_s: float | None
) -> tuple[int, bytes, str]:
    """Status, body and the engine that answered; empty where nobody says which it was."""
    forwarder = _forwarder_of(url) if method == "POST" else None
    if forwarder is not None:
        async with asyncio.timeout(timeout_s):
            return await forwarder.whole(*_as_sent(url, payload, headers))
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with get_session().request(method, url, json=payload, headers=headers, timeout=timeout) as response:
        return response.status, await response.read(), response.headers.get(ANSWERED_BY, "")


@contextlib.asynccontextmanager
async def _begun(
    url: str, payload: Any, headers: dict[str, str], deadline: float | None
) -> AsyncGenerator[tuple[aiohttp.ClientResponse, str]]:
    """An answer to a POST that is still to be read, and the engine that gives it."""
    forwarder = _forwarder_of(url)
    if forwarder is not None:
        async with asyncio.timeout_at(deadline):
            answer = await forwarder.begun(*_as_sent(url, payload, headers))
        try:
            async with answer.response as response:
                yield response, answer.engine
        finally:
            answer.over()
        return
    async with asyncio.timeout_at(deadline):
        response = await get_session().post(url, json=payload, headers=headers)
    async with response:
        if response.status >= 400:
            async with asyncio.timeout_at(deadline):
                raise HttpError(response.status, await response.text(errors="replace"), url)
        yield response, response.headers.get(ANSWERED_BY, "")


def _as_sent(url: str, payload: Any, headers: dict[str, str]) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers of a POST."""
    path = url.split("/", 3)[3] if url.count("/") > 2 else ""
    return path, _as_json(payload).encode(), {**headers, "Content-Type": "application/json"}


def _with_engine(answer: Any, engine: str) -> Any:
    """What an engine tells of an answer says which it was, where a balancer of ours knows."""
    meta = answer.get("meta_info") if engine and isinstance(answer, dict) else None
    if isinstance(meta, dict):
        meta["answered_by"] = engine
    return answer


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """What follows a last event is the end of the answer: a connection that is read to it serves again."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_LAST_BYTES_S):
            await response.read()


async def stream(
    url: str,
    payload: Any,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float | None = None,
    newest: bool = False,
) -> AsyncGenerator[Any, None]:
    """POST JSON and yield the server-sent events as they come, decoded. Nothing is sent again.

    `newest`: each event holds all that was in those before it, so of events that have come together only the
    last is read. Who is late then has less to do, not more: a thousand streams stay answerable.
    Raises `HttpError`: with the status of an error answer,
    or 0 when the connection ends before the event [DONE].
    """
    told = stream_together(url, payload, headers, timeout_s=timeout_s, newest=newest)
    async with contextlib.aclosing(told) as together:
        async for events in together:
            for event in events:
                yield event


async def stream_together(
    url: str,
    payload: Any,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float | None = None,
    newest: bool = False,
) -> AsyncGenerator[list[Any], None]:
    """As `stream`, those events at once that came at once: many short ones then cost a fraction."""
    observer = _observer.get()
    if observer is not None:
        observer.sending(url, payload)
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    try:
        if _inner and (server := _inner.get(_origin(url))) is not None:
            async for event in await server("POST", url.split("/", 3)[3], payload, headers or {}):
                yield [event]
            return
        async with (
            _begun(url, payload, with_token(url, headers), deadline) as (response, engine),
            # Closed here: one that is left to the collector costs the loop a wake-up and a task.
            contextlib.aclosing(_events(response.content, deadline)) as told_of,
        ):
            async for texts, ended in told_of:
                events, unreadable = _decoded(texts[-1:] if newest else texts, engine)
                if observer is not None:
                    for event in events:
                        observer.answered(url, event)
                if events:
                    yield events
                if unreadable is not None:
                    raise unreadable
                if ended:
                    await _read_to_end(response)
                    return
    except (*_RETRYABLE, ValueError) as error:
        raise HttpError(0, f"the stream broke ({type(error).__name__}: {error})", url) from error
    raise HttpError(0, "the stream ended before its last event", url)


def _decoded(texts: list[bytes], engine: str) -> tuple[list[Any], ValueError | None]:
    """The events before the first that cannot be read, and why that cannot."""
    if len(texts) > 1:
        with contextlib.suppress(ValueError):  # one by one, it is found out which
            read = json.loads(b"[%s]" % b",".join(texts))
            if len(read) == len(texts):
                return [_with_engine(event, engine) for event in read], None
    events: list[Any] = []
    for text in texts:
        try:
            events.append(_with_engine(json.loads(text), engine))
        except ValueError as error:
            return events, error
    return events, None


async def _events(
    content: aiohttp.StreamReader, deadline: float | None
) -> AsyncGenerator[tuple[list[bytes], bool], None]:
    """The events that have come together, and whether [DONE] has; TimeoutError at the deadline.

    Of any length: the reader's own lines have a limit that one event of a long answer passes.
    """
    rest: list[bytes] = []
    while True:
        async with asyncio.timeout_at(deadline):
            chunk = await content.readany()
        if not chunk:
            return
        first, *more = chunk.split(b"\n")
        rest.append(first)
        if not more:
            continue
        lines, rest = [b"".join(rest), *more[:-1]], more[-1:]
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        yield [event for event in events if event != b"[DONE]"], b"[DONE]" in events


def get_rollout_num_engines(args: argparse.Namespace) -> int:
    """How many engines serve the policy."""
    return max(1, args.rollout_num_gpus // args.rollout_num_gpus_per_engine)
