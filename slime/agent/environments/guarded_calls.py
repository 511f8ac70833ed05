"""Calls of environments that cannot block the run: each episode has its own thread, each call a deadline.

A thread cannot be killed. One whose call hangs is abandoned and counted; too many of them stop the run, with
an error that names the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from slime.agent.environments.protocol import EnvironmentFailure
from slime.utils.async_utils import started
from slime.utils.errors import RunStopped

MAX_HANGING = 64  # threads whose call did not return
_ABOUT_ERRORS = 300  # characters

_hanging: set[threading.Thread] = set()


class EnvironmentCalls:
    """Awaitable methods of one environment. `seconds` is the time spent in them."""

    def __init__(self, name: str, make: Callable[[], Any], timeout_s: float):
        self.name, self.make, self.timeout_s, self.seconds = name, make, timeout_s, 0.0
        self._environment: Any = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self) -> Any:
        """Make the environment and return it, for its attributes only."""
        self._environment = await self._in_time("its start", lambda: self._threaded(self.make))
        return self._environment

    async def call(self, method: str, *values: Any) -> Any:
        """Call a method; EnvironmentFailure if it raises or does not return in time."""
        function = getattr(self._environment, method, None)
        if function is None:
            if method in ("score", "close"):
                return None
            raise EnvironmentFailure(f"environment {self.name}: it has no method {method}")
        if inspect.iscoroutinefunction(function):
            return await self._in_time(method, lambda: function(*values))
        return await self._in_time(method, lambda: self._threaded(lambda: function(*values)))

    async def close(self) -> None:
        """Close the environment; errors of its own `close` are ignored."""
        if self._environment is not None:
            with contextlib.suppress(EnvironmentFailure):
                await self.call("close")
        self._work.put(None)

    def has(self, method: str) -> bool:
        return callable(getattr(self._environment, method, None))

    def restarted(self) -> EnvironmentCalls:
        """Return the calls of a new environment of the same kind."""
        return EnvironmentCalls(self.name, self.make, self.timeout_s)

    def forget(self) -> None:
        """End the environment's thread without waiting."""
        self._work.put(None)

    async def _in_time(self, what: str, begin: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                return await begin()
        except TimeoutError as error:
            if not deadline.expired():
                raise self._failure(what, error) from error
            self._abandon_thread()
            raise EnvironmentFailure(
                f"environment {self.name}: {what} did not return within --timeouts env={self.timeout_s:g}"
            ) from None
        except (EnvironmentFailure, RunStopped):
            raise
        except Exception as error:
            raise self._failure(what, error) from error
        finally:
            self.seconds += time.monotonic() - begun

    def _failure(self, what: str, error: BaseException) -> EnvironmentFailure:
        said = f"{type(error).__name__}: {str(error)[:_ABOUT_ERRORS]}"
        return EnvironmentFailure(f"environment {self.name}: {what} raised {said}")

    async def _threaded(self, call: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_tasks, args=(self._work,), name=f"environment {self.name}", daemon=True
            )
            self._thread.start()

        def alive() -> Any:
            try:
                return call()
            except SystemExit as error:  # raised by the environment: it must not end the run
                raise RuntimeError(f"{type(error).__name__}: {error}") from error

        return await asyncio.wrap_future(started(self._work.put, alive))

    def _abandon_thread(self) -> None:
        if self._thread is None:
            return
        self._work.put(None)  # in case it returns after all
        _hanging.add(self._thread)
        self._thread, self._environment = None, None
        self._work = queue.SimpleQueue()
        _hanging.difference_update([thread for thread in _hanging if not thread.is_alive()])
        if len(_hanging) > MAX_HANGING:
            raise RunStopped(
                f"--env {self.name}: {len(_hanging)} calls of environments have hung for longer than "
                f"--timeouts env={self.timeout_s:g}. Fix the environment, or give it more time."
            )


def _run_tasks(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := work.get()) is not None:
        task()
