"""How many files a process may have open, connections among them, and what happens to requests beyond that.

Without a place for one more file a process takes no connection, and can read no weights and write no log
either. So servers keep some places back: a request beyond the others is told to come again (503), and whoever
waits in the queue of the system is taken when there is room.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import resource
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

_MOST = 1 << 16  # what a process of ours may ever need
_KEPT_BACK = 128  # for weights, logs, probes and libraries
_RETRY_AFTER_S = 1
_LOOK_EVERY_S = 0.5
_TELL_EVERY_S = 30.0


def raise_limit() -> int:
    """Takes what the system allows this process (`ulimit -Hn`), many of which begin with 1024; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST if soft == resource.RLIM_INFINITY else soft


def most_requests(files_each: int = 1) -> int:
    """How many requests may be open at once, each with so many connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = _MOST if soft == resource.RLIM_INFINITY else soft
    return max(1, (places - min(_KEPT_BACK, places // 2)) // files_each)


def tell_of_scarcity(loop: asyncio.AbstractEventLoop) -> None:
    """That no connection can be taken is one line now and then, not a traceback for each that waits."""
    before, last = loop.get_exception_handler(), -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        if not str(context.get("message")).startswith("socket.accept() out of system resource"):
            loop.default_exception_handler(context) if before is None else before(loop, context)
        elif time.monotonic() - last > _TELL_EVERY_S:
            last = time.monotonic()
            logger.warning(
                "no place for more connections (ulimit -n is %d): others wait until some have ended",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )

    loop.set_exception_handler(handle)


class _Room:
    """Whether most places for files are taken; looked at now and then, since counting takes a while."""

    def __init__(self) -> None:
        self._looked, self._scarce = -math.inf, False

    def is_scarce(self) -> bool:
        now = time.monotonic()
        if now - self._looked > _LOOK_EVERY_S:
            try:
                self._scarce = len(os.listdir("/proc/self/fd")) > most_requests() // 2
            except OSError:  # a system without it
                self._scarce = False
            self._looked = now
        return self._scarce


def refusing_too_many(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], files_each: int = 1
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The handler, and a 503 with words for requests beyond what the process may have open."""
    from aiohttp import web  # here: most who import this file serve nothing

    num_open = 0
    room = _Room()

    @functools.wraps(handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal num_open
        most = most_requests(files_each)
        if num_open >= most:
            text = (
                f"{num_open} requests are open, as many as this process has files for: ask again later, or "
                "raise its limit (ulimit -n)"
            )
            headers = {"Retry-After": str(_RETRY_AFTER_S)}
            refused = web.json_response({"error": {"message": text}}, status=503, headers=headers)
            refused.force_close()
            return refused
        num_open += 1
        try:
            response = await handler(request)
        finally:
            num_open -= 1
        if not response.prepared and room.is_scarce():
            response.force_close()  # a client that keeps its connection would keep others out
        return response

    return handle
