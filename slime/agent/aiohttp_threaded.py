"""Runs an aiohttp application in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.web_log import AccessLogger

_START_S = 60.0
_STOP_S = 10.0


@dataclass(slots=True)
class AppHandle:
    """The address of a running application; `stop` ends it and its thread."""

    host: str
    port: int
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    runner: web.AppRunner

    def stop(self) -> None:
        if self.loop.is_closed():
            return
        _call(self.runner.cleanup(), self.loop, _STOP_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_STOP_S)
        self.loop.close()


class FilteredAccessLogger(AccessLogger):
    """Logs only requests that failed or took long; `access_log_class` of an aiohttp runner."""

    SLOW_S = 120.0

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.method != "HEAD" and (response.status >= 400 or time > self.SLOW_S):
            super().log(request, response, time)


def run_app_in_thread(
    app: web.Application,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    shutdown_timeout: float = 1.0,
    thread_name: str = "slime-aiohttp",
    runner_kwargs: Mapping[str, Any] | None = None,
) -> AppHandle:
    """Start serving and return when it listens. A client that disconnects cancels its handler.

    `runner_kwargs`: options of aiohttp's AppRunner. With an `access_log_class`, requests are logged by
    the logger `aiohttp.access`.
    """
    given = dict(runner_kwargs or {})
    log = logging.getLogger("aiohttp.access") if "access_log_class" in given else None
    options: dict[str, Any] = {"handler_cancellation": True, "shutdown_timeout": shutdown_timeout}
    options |= {"access_log": log, **given}
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=thread_name, daemon=True)
    thread.start()
    runner = web.AppRunner(app, **options)
    try:
        bound = _call(_serve(runner, host, port), loop, _START_S)
    except BaseException:
        loop.call_soon_threadsafe(loop.stop)
        raise
    return AppHandle(host, bound, loop, thread, runner)


async def _serve(runner: web.AppRunner, host: str, port: int) -> int:
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    address: tuple[str, int] = runner.addresses[0]
    return address[1]


def _call(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, timeout_s: float) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout_s)
