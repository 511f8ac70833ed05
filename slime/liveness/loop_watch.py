"""Reports code that blocks the event loop, on which every sample of a run waits.

A coroutine that sleeps without `await`, computes for long or meets a catastrophic regular expression blocks
all others, and no deadline of asyncio reaches it. This module only logs the line where it stands.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from pathlib import Path

logger = logging.getLogger(__name__)

_SLOW_S, _LOOK_EVERY_S = 10.0, 1.0
_NOT_THE_USERS = (f"{Path(__file__).parents[1]}/", "/lib/python", "<frozen")


def watch_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Watch a loop that runs, from a thread of this process; each place is reported once."""
    threading.Thread(target=_watch, args=(loop,), name="loop-watch", daemon=True).start()


def _watch(loop: asyncio.AbstractEventLoop) -> None:
    threads: list[int] = []
    reported: set[str] = set()
    loop.call_soon_threadsafe(lambda: threads.append(threading.get_ident()))
    while not loop.is_closed():
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        if not answered.wait(_SLOW_S) and threads:
            if (place := _place_of(threads[0])) is None:
                return
            if place not in reported:
                reported.add(place)
                logger.warning(
                    "%s has blocked the event loop for %.0f s so far: all other samples wait. Let it `await` "
                    "what takes long, e.g. asyncio.to_thread(f, ...).",
                    *(place, _SLOW_S),
                )
            answered.wait()
        time.sleep(_LOOK_EVERY_S)


def _place_of(thread: int) -> str | None:
    """Return where a thread is, in the user's own code if that is on its stack. None: it has ended."""
    if (running := sys._current_frames().get(thread)) is None:
        return None
    stack = traceback.extract_stack(running)[::-1]
    own = (frame for frame in stack if not any(part in frame.filename for part in _NOT_THE_USERS))
    frame = next(own, stack[0])
    return f"{frame.name} ({frame.filename}:{frame.lineno})"
