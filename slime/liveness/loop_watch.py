"""Reports which user function blocks the event loop, on which every sample of a run waits.

A coroutine that sleeps without `await`, computes for long or meets a catastrophic regular expression blocks
all others, and no deadline of asyncio reaches it. This module only logs the name of such a call and its line.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Coroutine, Generator, Iterator
from typing import Any

from slime.utils.machine import descriptors

logger = logging.getLogger(__name__)

SLOW_STEP_S = 5.0
_LOOK_EVERY_S = 1.0


class LoopWatch:
    """Knows the steps in progress, which its thread checks: the work of a thread between two awaits."""

    def __init__(self) -> None:
        self._steps: dict[object, tuple[str, int, float]] = {}  # name, thread and start
        self._reported: set[str] = set()  # names, each once
        self._thread: threading.Thread | None = None

    async def run(self, name: str, call: Awaitable[Any]) -> Any:
        """Await `call`, a coroutine of the function `name`; other awaitables are not watched."""
        return await (_Stepwise(self, name, call) if isinstance(call, Coroutine) else call)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Surround code that runs on the loop without an await."""
        if self._thread is None or not self._thread.is_alive():  # a forked process lacks the thread
            self._steps.clear()
            self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
            self._thread.start()
        key, started = object(), time.monotonic()
        self._steps[key] = name, threading.get_ident(), started
        try:
            yield
        finally:
            self._steps.pop(key, None)
            descriptors.check(name)  # now: the loop itself cannot run without them
            seconds = time.monotonic() - started
            if seconds > SLOW_STEP_S:
                self._report(name, f"held up the event loop for {seconds:.1f} s")

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            for name, thread, started in list(self._steps.values()):
                seconds, frame = time.monotonic() - started, sys._current_frames().get(thread)
                if seconds > 2 * SLOW_STEP_S and frame is not None:
                    place = traceback.extract_stack(frame)[-1]
                    where = f"{place.filename}:{place.lineno} in {place.name}"
                    self._report(
                        name, f"has held up the event loop for {seconds:.0f} s so far (now at {where})"
                    )

    def _report(self, name: str, what: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            advice = "Let it `await` what takes long, e.g. asyncio.to_thread(f, ...)."
            logger.warning("%s %s: all other samples waited. %s", name, what, advice)


class _Stepwise:
    """Awaits a coroutine, with every stretch between two of its awaits inside a step."""

    def __init__(self, watch: LoopWatch, name: str, coroutine: Coroutine[Any, Any, Any]):
        self._watch, self._name, self._coroutine = watch, name, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        resume, value = self._coroutine.send, None
        while True:
            with self._watch.step(self._name):
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


loop_watch = LoopWatch()
