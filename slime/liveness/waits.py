"""Gives every wait an owner, a name and a deadline; a breach is an error that names all three.

`slime status`, the dashboard and post-mortems show the table of waits in progress. Workers send theirs to the
driver with every heartbeat, and the driver writes them all to a file (`slime.liveness.wait_table`).
"""

import asyncio
import collections
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

OF_ONE_REQUEST = " (request "  # in the name of a wait, followed by the id of the request
_SHORT_S, _MAX_ENDED = 0.01, 5000


class WaitTimeout(TimeoutError):
    """A named wait exceeded its deadline. `others`: the other waits of this process at that moment."""

    def __init__(self, *words: object):
        super().__init__(*words)
        self.others = active()


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait in progress. `target`: the process that is waited for; empty: nobody in particular.

    `deadline_s` None: the heartbeat of the target bounds it; infinite: it lasts until somebody ends it.

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
_ended: collections.deque[tuple[Wait, float]] = collections.deque(maxlen=_MAX_ENDED)


def drain_ended() -> list[tuple[Wait, float]]:
    """Return the longer waits that ended since the last call, each with its end in seconds since 1970."""
    with _lock:
        found = list(_ended)
        _ended.clear()
    return found


def name_process(name: str) -> None:
    """Set the owner of all waits of this process that name no other owner."""
    global _process_name
    _process_name = name


def know_as(address: str, name: str) -> None:
    """Show the process at this address under `name` in the wait table."""
    _known_as[address.rstrip("/")] = name


def known_as(target: str) -> str:
    return _known_as.get(target.rstrip("/"), target)


def num_ended() -> int:
    """Return the number of waits of this process that ended: while it grows, the run makes progress."""
    return _num_ended


def active() -> list[Wait]:
    """Return the waits in progress in this process, oldest first."""
    with _lock:
        return sorted(_active.values(), key=lambda w: w.started)


@contextlib.contextmanager
def waiting(
    name: str, *, owner: str = "", deadline_s: float | None = None, target: str = "", moves: bool = True
) -> Iterator[Wait]:
    """Register a wait for its duration; the body enforces the deadline itself.

    `moves` False: its end is no progress of the run (a health check).
    """
    global _num_ended
    wait = Wait(name, owner or _process_name, time.monotonic(), deadline_s, target)
    if getattr(_thread, "is_quiet", False):
        yield wait
        return
    key = next(_ids)
    mark(key, wait)
    try:
        yield wait
    finally:
        with _lock:
            del _active[key]
            _num_ended += moves
            if moves and wait.age_s >= _SHORT_S:
                _ended.append((wait, time.time()))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Leave waits of this thread out of the table: they are parts of one that is in it already."""
    before, _thread.is_quiet = getattr(_thread, "is_quiet", False), True
    try:
        yield
    finally:
        _thread.is_quiet = before


def mark(key: object, wait: Wait | None) -> None:
    """Enter a wait under a key of the caller's; None: remove it."""
    with _lock:
        if wait is not None:
            _active[key] = wait
        else:
            _active.pop(key, None)


@contextlib.asynccontextmanager
async def limited(
    name: str, deadline_s: float, *, owner: str = "", target: str = "", moves: bool = True
) -> AsyncIterator[None]:
    """Give everything that the block awaits a name and a deadline."""
    with waiting(name, owner=owner, deadline_s=deadline_s, target=target, moves=moves):
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                yield
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
) -> None:
    """Poll `condition` until it holds; it may raise to give up early with the cause."""
    with waiting(name, owner=owner, deadline_s=deadline_s) as wait:
        while not condition():
            if wait.age_s > deadline_s:
                raise _breach(name, owner, deadline_s)
            time.sleep(interval_s)


def _breach(name: str, owner: str, deadline_s: float) -> WaitTimeout:
    by = f" (waited for by {owner})" if owner else ""
    return WaitTimeout(f"{name}{by}: not done after {deadline_s:.1f} s")
