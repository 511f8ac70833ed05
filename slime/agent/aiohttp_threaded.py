"""An aiohttp application in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from aiohttp import web

_START_S = 60.0
_STOP_S = 10.0


@dataclass(slots=True)
class AppHandle:
    """Where the application listens; `stop` ends it and its thread."""

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


def run_app_in_thread(
    app: web.Application, host: str = "127.0.0.1", port: int = 0, *, shutdown_timeout: float = 1.0
) -> AppHandle:
    """Start serving and return when it listens. A client that leaves cancels the handler of its request."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="slime-aiohttp", daemon=True)
    thread.start()
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout, access_log=None)
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
