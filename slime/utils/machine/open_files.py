"""Limits the open files of a process, connections included, and refuses requests beyond the limit.

A process without a free file descriptor accepts no connection, reads no weights and writes no log. So servers
reserve some: a request beyond the limit gets a 503 and may retry, and connections in the system's queue are
accepted when there is room.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

_MOST = 1 << 16  # what a process of ours may ever need
_KEPT_BACK = 128  # for weights, logs, probes and libraries


def open_missing_streams() -> None:
    """Open standard streams that were closed by whoever started the command.

    Otherwise the next opened file gets their number, and a library's errors are written into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def raise_limit() -> int:
    """Raise the soft limit, often 1024, to what the system allows (`ulimit -Hn`); return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST if soft == resource.RLIM_INFINITY else soft


def most_requests(files_each: int = 1) -> int:
    """Return how many requests may be open at once, each with `files_each` connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = _MOST if soft == resource.RLIM_INFINITY else soft
    return max(1, (places - min(_KEPT_BACK, places // 2)) // files_each)


def refusing_too_many(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], files_each: int = 1
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Wrap a handler so that requests beyond the limit of open files get a 503 with the reason."""
    from aiohttp import web  # here: most who import this file serve nothing

    num_open = 0

    @functools.wraps(handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal num_open
        most = most_requests(files_each)
        if num_open >= most:
            text = f"{num_open} requests are open, the limit of this process: retry, or raise it (ulimit -n)"
            error = {"error": {"message": text}}
            refused = web.json_response(error, status=503, headers={"Retry-After": "1"})
            refused.force_close()
            return refused
        num_open += 1
        try:
            return await handler(request)
        finally:
            num_open -= 1

    return handle
