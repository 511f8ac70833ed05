"""HTTP client for rollout code: one session per event loop, uniform retries, and errors with their cause.

A 4xx is the caller's mistake and is raised at once. A 5xx and a refused or broken connection are retried with
back-off, because a dead engine is being restarted meanwhile; a 500 comes from a server that is alive, so it
is retried only a few times. Engines that require a token get it (`authorize`).
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import itertools
import json
import logging
import random
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import aiohttp

try:
    import orjson
except ImportError:  # optional: it only makes reading faster
    orjson = None  # type: ignore[assignment]

from slime.utils.machine.open_files import most_requests, raise_limit

# Plug-ins import these names from here.
from slime.utils.machine.ports import find_available_port as find_available_port
from slime.utils.machine.ports import get_host_info as get_host_info
from slime.utils.machine.ports import is_loopback as is_loopback
from slime.utils.machine.ports import is_port_available as is_port_available

CLIENT = "slime"  # the user agent of requests whose sampling parameters were checked by this client
ANSWERED_BY = "X-Slime-Engine"  # set by our balancer: the address of the engine that responded
_MAX_CONNECTIONS = 4096
_BACKOFF_CAP_S = 5.0
_ANSWERED_RETRIES = 8  # after error responses of a living server, about 15 s
_WARN_EVERY_S = 30.0
_END_S = 1.0  # at exit, until cancelled tasks have ended
_LAST_BYTES_S = 1.0  # until the bytes after the last event of a stream have arrived
# Shorter than servers keep an idle connection (uvicorn: 5 s), or a call could meet one that is closing.
_KEEPALIVE_S = 2.0
# Failures of the connection itself: the request may be sent again.
_RETRYABLE = (
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,
    ConnectionError,
    asyncio.TimeoutError,
)

logger = logging.getLogger(__name__)
_warned_at = -_WARN_EVERY_S
_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
    weakref.WeakKeyDictionary()
)


class Observer(Protocol):
    """Observes each POST of a task. An exception of `sending` reaches the caller of `post` or `stream`."""

    def sending(self, url: str, payload: Any) -> None: ...

    def answered(self, url: str, answer: Any) -> None: ...


_observer: ContextVar[Observer | None] = ContextVar("slime_http_observer", default=None)


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Let `observer` see every POST in this block and in tasks started in it."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def is_observed() -> bool:
    """Return whether an observer sees what the running task posts."""
    return _observer.get() is not None


# A new engine reads the token that it must require from here; a run reads the token of external engines.
TOKEN_VARIABLE = "SLIME_ENGINE_TOKEN"
_tokens: dict[str, str] = {}  # by origin: http://host:port


def authorize(url: str, token: str | None) -> None:
    """Send the token with all further requests of this process to that server; None: send none."""
    if token is None:
        _tokens.pop(_origin(url), None)
    else:
        _tokens[_origin(url)] = token


def token_of(url: str) -> str | None:
    return _tokens.get(_origin(url))


def with_token(url: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers of a request to `url`; an engine's token replaces what a client may have sent."""
    token, headers = token_of(url), dict(headers or {})
    if token is not None:
        headers = {k: v for k, v in headers.items() if k.lower() != "authorization"}
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _origin(url: str) -> str:
    return "/".join(str(url).split("/", 3)[:3])


class HttpError(RuntimeError):
    """An error response. `status` 0: there was no response at all."""

    def __init__(self, status: int, body: str, url: str):
        super().__init__(f"{url} answered {status}: {body[:2000]}" if status else f"{url}: {body}")
        self.status, self.body, self.url = status, body, url

    def __reduce__(self) -> tuple[type[HttpError], tuple[int, str, str], dict[str, Any]]:
        return HttpError, (self.status, self.body, self.url), vars(self)


def get_session() -> aiohttp.ClientSession:
    """Return the session of the running loop; sockets must not be shared between loops."""
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        raise_limit()
        # A request through our balancer needs two more descriptors there. Surplus requests wait here.
        most = min(_MAX_CONNECTIONS, most_requests(files_each=3))
        session = _sessions[loop] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=most, limit_per_host=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"User-Agent": CLIENT},
        )
    return session


def use_session(loop: asyncio.AbstractEventLoop, session: Any) -> None:
    """Use `session` for the requests of this loop: a simulation has one that reaches modelled engines."""
    _sessions[loop] = session


async def close_session() -> None:
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


@atexit.register
def _close_sessions() -> None:
    """Close open sessions at exit; aiohttp would report them as leaks."""
    for loop, session in list(_sessions.items()):
        with contextlib.suppress(Exception):
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(_end_loop(), loop).result(2 * _END_S)
            elif not loop.is_closed():
                loop.run_until_complete(session.close())


async def _end_loop() -> None:
    """Cancel the tasks first: one that retries its request would open a new session."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # read, so that it is not reported as never retrieved
    await close_session()


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float | None = None,
    retry_if: Callable[[HttpError], bool] = lambda error: False,
) -> Any:
    """POST JSON and return the decoded response (text when it is not JSON).

    `retry_if` selects error responses other than 5xx that are retried, too.
    """
    observer = _observer.get()
    if observer is not None:
        observer.sending(url, payload)
    answer = await _request("POST", url, payload, max_retries, headers, timeout_s, retry_if)
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
    retry_if: Callable[[HttpError], bool] = lambda error: False,
) -> Any:
    for attempt in itertools.count(1):
        try:
            return await _request_once(method, url, payload, headers, timeout_s)
        except HttpError as error:
            allowed = min(max_retries, _ANSWERED_RETRIES) if error.status == 500 else max_retries
            if attempt > allowed or (error.status < 500 and not retry_if(error)):
                raise
            _warn_of_retry(error)
        except _RETRYABLE as error:
            if attempt > max_retries:
                what = f"no response after {attempt} attempts ({type(error).__name__}: {error})"
                raise HttpError(0, what, url) from error
        await asyncio.sleep(min(0.1 * 2 ** min(attempt, 10), _BACKOFF_CAP_S) * random.uniform(0.5, 1.0))


def _warn_of_retry(error: HttpError) -> None:
    """Log the error at most once in a while: thousands of requests may fail for the same reason."""
    global _warned_at
    if (now := time.monotonic()) - _warned_at >= _WARN_EVERY_S:
        _warned_at = now
        logger.warning("%s; the request is retried", str(error)[:500])


async def _request_once(
    method: str, url: str, payload: Any, headers: dict[str, str] | None, timeout_s: float | None
) -> Any:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    sent = get_session().request(method, url, json=payload, headers=with_token(url, headers), timeout=timeout)
    async with sent as response:
        body = await response.read()
        if response.status >= 400:
            raise HttpError(response.status, body.decode(errors="replace"), url)
    try:
        return _with_engine(read_json(body), response) if body else None
    except ValueError:
        return body.decode(errors="replace")


def read_json(body: bytes) -> Any:
    """Decode JSON, with orjson if it is installed: responses are long lists of numbers."""
    if orjson is None:
        return json.loads(body)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(body)  # accepts NaN, which an engine with broken weights sends


def _with_engine(answer: Any, response: aiohttp.ClientResponse) -> Any:
    """Add the engine that generated a response to its meta_info, if our balancer reports it."""
    engine = response.headers.get(ANSWERED_BY)
    if engine and isinstance(answer, dict) and isinstance(answer.get("meta_info"), dict):
        answer["meta_info"]["answered_by"] = engine
    return answer


async def stream(
    url: str,
    payload: Any,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float | None = None,
) -> AsyncGenerator[Any, None]:
    """POST JSON and yield the decoded server-sent events as they arrive. Nothing is retried.

    Raises `HttpError`: with the status of an error response, or 0 if the connection ends before [DONE].
    """
    observer = _observer.get()
    if observer is not None:
        observer.sending(url, payload)
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout_at(deadline):
            response = await get_session().post(url, json=payload, headers=with_token(url, headers))
        # Closed here: leaving a generator to the garbage collector costs the loop a wake-up and a task.
        async with response, contextlib.aclosing(_events(response, deadline)) as arrived:
            async for texts, ended in arrived:
                for text in texts:
                    event = _with_engine(read_json(text), response)
                    if observer is not None:
                        observer.answered(url, event)
                    yield event
                if ended:
                    await _read_to_end(response)
                    return
    except (*_RETRYABLE, ValueError) as error:
        raise HttpError(0, f"the stream broke ({type(error).__name__}: {error})", url) from error
    raise HttpError(0, "the stream ended before its last event", url)


async def _events(
    response: aiohttp.ClientResponse, deadline: float | None
) -> AsyncGenerator[tuple[list[bytes], bool], None]:
    """Yield the events that arrived together, and whether [DONE] did; TimeoutError at the deadline.

    Events may be longer than the limit of aiohttp's line reader.
    """
    if response.status >= 400:
        async with asyncio.timeout_at(deadline):
            raise HttpError(response.status, await response.text(errors="replace"), str(response.url))
    rest: list[bytes] = []
    while True:
        async with asyncio.timeout_at(deadline):
            chunk = await response.content.readany()
        if not chunk:
            return
        first, *more = chunk.split(b"\n")
        rest.append(first)
        if not more:
            continue
        lines, rest = [b"".join(rest), *more[:-1]], more[-1:]
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        yield [event for event in events if event != b"[DONE]"], b"[DONE]" in events


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last event, so that the connection can serve another request."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_LAST_BYTES_S):
            await response.read()


def get_rollout_num_engines(args: argparse.Namespace) -> int:
    """Return the number of engines that serve the policy."""
    return max(1, args.rollout_num_gpus // args.rollout_num_gpus_per_engine)
