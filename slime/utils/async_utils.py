"""The one asyncio loop of a process: a background thread that owns its HTTP connections and semaphores."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_replacement: Callable[[Coroutine[Any, Any, Any]], Any] | None = None  # set by a simulation


def get_loop() -> asyncio.AbstractEventLoop:
    """Return the process's background loop, which starts on first use."""
    global _loop, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="slime-asyncio", daemon=True)
            _thread.start()
        return _loop


@contextlib.contextmanager
def replaced_by(runner: Callable[[Coroutine[Any, Any, Any]], Any]) -> Iterator[None]:
    """Replace `run` by `runner` in this block: a simulation has its own loop and clock."""
    global _replacement
    before, _replacement = _replacement, runner
    try:
        yield
    finally:
        _replacement = before


def current_loop() -> asyncio.AbstractEventLoop | None:
    """Return the background loop; None: it was never started."""
    return _loop


def run(coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Run `coro` on the background loop and return its result; the caller's thread blocks.

    After `timeout_s` it is cancelled, and TimeoutError raised.
    """
    if _replacement is not None:
        result: T = _replacement(coro)
        return result
    if threading.current_thread() is _thread:
        coro.close()
        raise RuntimeError(
            "slime.utils.async_utils.run was called on the loop that it would block: use `await` there"
        )
    future = asyncio.run_coroutine_threadsafe(coro, get_loop())
    try:
        return future.result(timeout_s)
    except BaseException:
        future.cancel()  # a Ctrl-C in the waiting thread must not leave the coroutine running
        raise


async def all_or_none(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Return results in order; when one fails, or the caller is cancelled, stop the others first."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a daemon thread, in the caller's context.

    The thread may hang: unlike one of asyncio's own pool, it does not hold up the exit.
    """
    context = contextvars.copy_context()
    return started(
        lambda call: threading.Thread(target=call, name=name, daemon=True).start(), lambda: context.run(work)
    )


def started(start: Callable[[Callable[[], None]], object], call: Callable[[], T]) -> Future[T]:
    """Return a future of `call()`, which runs where `start` runs the function that it gets."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on a caller cannot cancel it

    def work() -> None:
        try:
            future.set_result(call())
        except (StopIteration, KeyboardInterrupt, GeneratorExit) as error:  # these break event loops
            reason = f"{type(error).__name__}: {error}"
            future.set_exception(RuntimeError(reason).with_traceback(error.__traceback__))
        except BaseException as error:  # a panic in a Rust library is not an Exception
            future.set_exception(error)

    start(work)
    return future
