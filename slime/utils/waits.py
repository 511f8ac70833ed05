"""Everything that waits has an owner, a name and a deadline; a breach is an error that says all three.

The table of waits in progress is what a live view or a post-mortem shows.
"""

from __future__ import annotations

import asyncio
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


class WaitTimeout(TimeoutError):
    """A named wait took longer than it may."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait in progress. `deadline_s` None: bounded by what it waits for (a user's own code)."""

    name: str
    owner: str
    started: float  # time.monotonic()
    deadline_s: float | None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started


_ids = itertools.count()
_active: dict[int, Wait] = {}
_lock = threading.Lock()


def active() -> list[Wait]:
    """The waits of this process that have not ended, oldest first."""
    with _lock:
        return sorted(_active.values(), key=lambda w: w.started)


@contextlib.contextmanager
def waiting(name: str, *, owner: str = "", deadline_s: float | None = None) -> Iterator[Wait]:
    """Registers a wait for its duration; the body enforces the deadline itself."""
    wait, key = Wait(name, owner, time.monotonic(), deadline_s), next(_ids)
    with _lock:
        _active[key] = wait
    try:
        yield wait
    finally:
        with _lock:
            del _active[key]


async def within(awaitable: Awaitable[T], name: str, deadline_s: float, *, owner: str = "") -> T:
    """`await` with a name and a deadline."""
    with waiting(name, owner=owner, deadline_s=deadline_s):
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                return await awaitable
        except TimeoutError:
            if not deadline.expired():
                raise  # a time-out of what was waited for
            raise _breach(name, owner, deadline_s) from None


def until(
    condition: Callable[[], bool], name: str, deadline_s: float, *, owner: str = "", interval_s: float = 0.05
) -> None:
    """Poll `condition` until it holds. It may raise to give up early with the cause."""
    with waiting(name, owner=owner, deadline_s=deadline_s) as wait:
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
