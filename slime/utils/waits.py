"""Everything that waits has an owner, a name and a deadline; a breach is an error that says all three.

The table of waits in progress is what `slime status`, the page and a post-mortem show: workers send theirs to
the driver with every sign of life, and the driver writes them all down (`slime.observability.wait_table`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

TELL_S = 10.0
OF_ONE_REQUEST = " (request "  # behind it stands the id of a request
_SHORT_S, _MAX_ENDED = 0.01, 5000


class WaitTimeout(TimeoutError):
    """A named wait took longer than it may. `others`: what else this process waited for at that moment."""

    def __init__(self, *words: object):
        super().__init__(*words)
        self.others = active()


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait in progress. `deadline_s` None: bounded by what it waits for, which shows that it lives;
    infinite: meant to last until somebody ends it. `target`: who is waited for; empty: nobody in particular.

    Example: Wait("trainer-0.train", "driver", 812.4, None, "trainer-0").
    """

    name: str
    owner: str
    started: float  # time.monotonic()
    deadline_s: float | None
    target: str = ""

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started


_ids = itertools.count()
_active: dict[object, Wait] = {}
_lock = threading.Lock()
_thread = threading.local()
_process_name = "driver"
_num_ended = 0
_known_as: dict[str, str] = {}
_ended: collections.deque[tuple[Wait, float]] | None = None  # None: nobody asks for them


def keep_ended() -> None:
    """From now on the waits of this process that took a while are kept for `take_ended`."""
    global _ended
    _ended = _ended if _ended is not None else collections.deque(maxlen=_MAX_ENDED)


def take_ended() -> list[tuple[Wait, float]]:
    """Those since the last call, each with the seconds since 1970 when it was over."""
    with _lock:
        found = list(_ended or ())
        if _ended is not None:
            _ended.clear()
    return found


def name_process(name: str) -> None:
    """Who this process is in the table; it owns the waits that name no other owner."""
    global _process_name
    _process_name = name


def know_as(address: str, name: str) -> None:
    """The process behind an address, as the table calls it."""
    _known_as[address.rstrip("/")] = name


def known_as(target: str) -> str:
    return _known_as.get(target.rstrip("/"), target)


def num_ended() -> int:
    """How many waits of this process came to their end: as long as it grows, something moves."""
    return _num_ended


def active() -> list[Wait]:
    """The waits of this process that have not ended, oldest first."""
    with _lock:
        return sorted(_active.values(), key=lambda w: w.started)


@contextlib.contextmanager
def waiting(
    name: str, *, owner: str = "", deadline_s: float | None = None, target: str = "", moves: bool = True
) -> Iterator[Wait]:
    """Registers a wait for its duration; the body enforces the deadline itself.

    `moves` False: that it ends says nothing of the run's progress (a look at somebody's health).
    """
    global _num_ended
    wait = Wait(name, owner or _process_name, time.monotonic(), deadline_s, target)
    if getattr(_thread, "is_quiet", False):
        yield wait
        return
    key = next(_ids)
    with _lock:
        _active[key] = wait
    try:
        yield wait
    finally:
        with _lock:
            del _active[key]
            _num_ended += moves
            if _ended is not None and moves and wait.age_s >= _SHORT_S:
                _ended.append((wait, time.time()))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Waits that this thread begins meanwhile are parts of one that is in the table already."""
    before, _thread.is_quiet = getattr(_thread, "is_quiet", False), True
    try:
        yield
    finally:
        _thread.is_quiet = before


def mark(key: object, wait: Wait | None) -> None:
    """What somebody is found to be waiting for, under a key of the caller's; None: it is over."""
    with _lock:
        if wait is not None:
            _active[key] = wait
        else:
            _active.pop(key, None)


async def within(
    awaitable: Awaitable[T],
    name: str,
    deadline_s: float,
    *,
    owner: str = "",
    target: str = "",
    moves: bool = True,
) -> T:
    """`await` with a name and a deadline."""
    with waiting(name, owner=owner, deadline_s=deadline_s, target=target, moves=moves):
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                return await awaitable
        except TimeoutError:
            if not deadline.expired():
                raise  # a time-out of what was waited for
            raise _breach(name, owner, deadline_s) from None


def until(
    condition: Callable[[], bool],
    name: str,
    deadline_s: float,
    *,
    owner: str = "",
    interval_s: float = 0.05,
    target: str = "",
) -> None:
    """Poll `condition` until it holds. It may raise to give up early with the cause."""
    with waiting(name, owner=owner, deadline_s=deadline_s, target=target) as wait:
        while not condition():
            if wait.age_s > deadline_s:
                raise _breach(name, owner, deadline_s)
            time.sleep(interval_s)


@contextlib.contextmanager
def telling(state: Callable[[], str], interval_s: float = TELL_S) -> Iterator[None]:
    """Logs `state()` after `interval_s` and then ever less
    often while the block runs: silence looks like a hang.
    """
    ended, started = threading.Event(), time.monotonic()

    def tell() -> None:
        pause_s = interval_s
        while not ended.wait(pause_s):
            logger.info("%s after %.0f s", state(), time.monotonic() - started)
            pause_s = min(1.5 * pause_s, 6 * interval_s)

    teller = threading.Thread(target=tell, name="telling", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _breach(name: str, owner: str, deadline_s: float) -> WaitTimeout:
    by = f" (waited for by {owner})" if owner else ""
    return WaitTimeout(f"{name}{by}: not done after {deadline_s:.1f} s")
