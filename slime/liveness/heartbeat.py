"""One heartbeat protocol for trainer ranks, engines and the router.

The watch asks every member once per interval whether it gave a sign of life. Ranks send theirs from a thread
of their own; engines answer an HTTP request from the thread that accepts connections. So long work is no
silence, but a stopped process is, and so is one that hangs with Python's lock held. The watch runs in its own
thread with its own event loop: user code that blocks the driver's loop must not make others look dead.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from slime.liveness import waits
from slime.liveness.vital_signs import Signs, SilenceClock
from slime.liveness.wait_table import SIGN_OF_LIFE

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # between two heartbeats of a rank
ENGINE_PATH = "/model_info"  # SGLang answers `/health` with a generation
_MISSED_ROUNDS = 3  # before a member appears in the wait table


class Beating(Protocol):
    """A process that gives signs of life. `name`: in the wait table; `title`: with its process, if known."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...

    async def heard(self, timeout_s: float) -> bool | None:
        """Return whether it gave a sign of life since the last call; None: it owes none now."""

    def signs(self) -> Signs | None:
        """Return what the operating system reports of its process; None: it cannot be seen from here."""


M = TypeVar("M", bound=Beating)


@dataclass(eq=False, slots=True)
class _Watched(Generic[M]):
    """A member with the clock of its silence."""

    member: M
    clock: SilenceClock
    next_warning_s: float
    given_up: bool = False


class HeartbeatWatch(Generic[M]):
    """Watches its members in one thread.

    `on_silence` gets a member that was silent for too long, and the cause; `on_return` gets it when it
    answers again. Warnings start at `warn_after_s` of silence.
    """

    def __init__(
        self,
        limit_s: float,
        on_silence: Callable[[M, str], None],
        on_return: Callable[[M], None] = lambda member: None,
        *,
        interval_s: float = BEAT_S,
        warn_after_s: float,
    ):
        self._limit_s, self._interval_s, self._warn_after_s = limit_s, interval_s, warn_after_s
        self._on_silence, self._on_return = on_silence, on_return
        self._watched: dict[int, _Watched[M]] = {}  # by id of the member
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, member: M) -> None:
        clock = SilenceClock(self._limit_s, 3 * self._interval_s)
        with self._lock:
            self._watched[id(member)] = _Watched(member, clock, self._warn_after_s)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
                self._thread.start()

    def remove(self, member: M) -> None:
        with self._lock:
            if (watched := self._watched.pop(id(member), None)) is not None:
                waits.mark(watched, None)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for watched in self._watched.values():
                waits.mark(watched, None)

    def _run(self) -> None:
        last = time.monotonic()
        with asyncio.Runner() as runner:
            while not self._closed.is_set():
                started = time.monotonic()
                members = list(self._watched.values())
                heard = runner.run(self._ask(members))
                now = time.monotonic()
                for watched, answer in zip(members, heard, strict=True):
                    self._judge(watched, answer, now - last)
                last = now
                self._closed.wait(max(0.0, self._interval_s - (now - started)))  # silent members took time

    async def _ask(self, members: list[_Watched[M]]) -> list[bool | None]:
        return await asyncio.gather(*(each.member.heard(self._interval_s) for each in members))

    def _judge(self, watched: _Watched[M], heard: bool | None, elapsed_s: float) -> None:
        member, clock = watched.member, watched.clock
        if heard is not False:
            if heard and watched.given_up:
                self._on_return(member)
            if heard and clock.silent_s >= self._warn_after_s:
                # Only now: whoever reads this line may call it.
                logger.warning("%s responds again after %.0f s", member.title, clock.silent_s)
            watched.given_up, watched.next_warning_s = False, self._warn_after_s
            waits.mark(watched, None)
            clock.hear()
            return
        with self._lock:  # a member that is removed meanwhile leaves no row in the wait table
            if self._closed.is_set() or id(member) not in self._watched:
                return
            self._miss(watched, elapsed_s)
        if clock.is_overdue and not watched.given_up:
            watched.given_up = True
            self._on_silence(member, f"{clock.silent_s:.0f} s: {clock.describe()}")

    def _miss(self, watched: _Watched[M], elapsed_s: float) -> None:
        """Count a silent round: enter the member in the wait table, and warn at doubling intervals."""
        member, clock = watched.member, watched.clock
        clock.miss(elapsed_s, member.signs())
        if clock.silent_s >= _MISSED_ROUNDS * self._interval_s:
            what = f"{SIGN_OF_LIFE} ({clock.describe()})"
            deadline_s = clock.allowed_s if self._limit_s < math.inf else None
            started = time.monotonic() - clock.silent_s
            waits.mark(watched, waits.Wait(what, "the watch", started, deadline_s, member.name))
        if clock.silent_s >= watched.next_warning_s and not clock.is_overdue:
            watched.next_warning_s *= 2
            cause = clock.describe()
            logger.warning("%s has not responded for %.0f s: %s", member.title, clock.silent_s, cause)


class HttpServer(Protocol):
    """An engine or the router, as far as its heartbeat needs it."""

    @property
    def url(self) -> str: ...
    def signs(self) -> Signs | None: ...


@dataclass(frozen=True, slots=True)
class HttpBeat:
    """The heartbeat of a server: any byte of an HTTP response, which costs no token.

    `is_watched`: whether its silence counts now; a server that is being started is somebody else's care.
    """

    server: HttpServer
    is_watched: Callable[[], bool]
    path: str = ENGINE_PATH

    @property
    def name(self) -> str:
        return waits.known_as(self.server.url)

    title = name

    async def heard(self, timeout_s: float) -> bool | None:
        if not self.is_watched():
            return None
        answered = await _answers(self.server.url, self.path, timeout_s)
        # Asked again: a server that was stopped or put to sleep meanwhile owed no answer.
        return True if answered else False if self.is_watched() else None

    def signs(self) -> Signs | None:
        return self.server.signs()


async def _answers(url: str, path: str, timeout_s: float) -> bool:
    """Return whether anything comes back, be it an error."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            with contextlib.closing(writer):
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
                )
                return bool(await reader.read(1))
    except (OSError, TimeoutError):
        return False
