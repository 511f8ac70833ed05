"""How many files a process may have open, connections among them, and what happens to requests beyond that.

Without a place for one more file a process takes no connection, and can read no weights and write no log
either. So servers keep some places back: a request beyond the others is told to come again (503), and whoever
waits in the queue of the system is taken when there is room.
"""

from __future__ import annotations

import functools
import math
import os
import resource
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

_MOST = 1 << 16  # what a process of ours may ever need
_KEPT_BACK = 128  # for weights, logs, probes and libraries
_RETRY_AFTER_S = 1
_LOOK_EVERY_S = 0.5


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
            headers = {"Retry-After": str(_RETRY_AFTER_S), "Connection": "close"}
            return web.json_response({"error": {"message": text}}, status=503, headers=headers)
        num_open += 1
        try:
            response = await handler(request)
        finally:
            num_open -= 1
        if not response.prepared and room.is_scarce():
            response.force_close()  # a client that keeps its connection would keep others out
        return response

    return handle
