"""Reports which user function blocks the event loop, on which every sample of a run waits.

A coroutine that sleeps without `await`, computes for long or meets a catastrophic regular expression blocks
all others, and no deadline of asyncio reaches it. This module only logs the name of such a call and its line.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Coroutine, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from slime.utils.machine import descriptors

logger = logging.getLogger(__name__)

SLOW_STEP_S = 5.0
_LOOK_EVERY_S = 1.0


@dataclass(eq=False, slots=True)
class _Step:
    """The work of one thread between two awaits of a user function."""

    name: str
    thread: int
    started: float


class LoopWatch:
    """Knows the steps in progress, which its thread checks."""

    def __init__(self) -> None:
        self._steps: set[_Step] = set()
        self._reported: set[str] = set()  # names, each once
        self._thread: threading.Thread | None = None

    async def run(self, name: str, call: Awaitable[Any]) -> Any:
        """Await `call`, a coroutine of the function `name`; other awaitables are not watched."""
        if not isinstance(call, Coroutine):
            return await call
        return await _Stepwise(call, functools.partial(self.step, name))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Surround code that runs on the loop without an await."""
        if self._thread is None or not self._thread.is_alive():  # a forked process lacks the thread
            self._steps.clear()
            self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
            self._thread.start()
        step = _Step(name, threading.get_ident(), time.monotonic())
        self._steps.add(step)
        try:
            yield
        finally:
            self._steps.discard(step)
            descriptors.check(name)  # now: the loop itself cannot run without them
            seconds = time.monotonic() - step.started
            if seconds > SLOW_STEP_S:
                self._report(name, f"held up the event loop for {seconds:.1f} s")

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            for step in list(self._steps):
                seconds = time.monotonic() - step.started
                if seconds > 2 * SLOW_STEP_S:
                    where = _line_of(step.thread)
                    self._report(step.name, f"has held up the event loop for {seconds:.0f} s so far{where}")

    def _report(self, name: str, what: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            advice = "Let it `await` what takes long, e.g. asyncio.to_thread(f, ...)."
            logger.warning("%s %s: all other samples waited. %s", name, what, advice)


class _Stepwise:
    """Awaits a coroutine, with every stretch between two of its awaits inside `step()`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], step: Any):
        self._coroutine, self._step = coroutine, step

    def __await__(self) -> Generator[Any, Any, Any]:
        resume, value = self._coroutine.send, None
        while True:
            with self._step():
                try:
                    awaited = resume(value)
                except StopIteration as end:
                    return end.value
            try:
                resume, value = self._coroutine.send, (yield awaited)
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:  # a cancellation, or the exception of what was awaited
                resume, value = self._coroutine.throw, error


def _line_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    place = traceback.extract_stack(frame)[-1]
    return f" (now at {place.filename}:{place.lineno} in {place.name})"


loop_watch = LoopWatch()
