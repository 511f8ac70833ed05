"""Tells which of a user's functions holds up the event loop, on which every sample of a run waits.

A coroutine that sleeps without `await`, computes for long or meets a
catastrophic regular expression stops all others; no deadline of asyncio reaches
it. Nothing here ends such a call: it is named, with its line, while it lasts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
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
# One C call (a regular expression) can keep every Python thread from running, the watch too. Then the
# interpreter itself writes where all threads stand.
_NOBODY_RUNS_S = 30.0
_NOT_BEGUN = object()


@dataclass(eq=False, slots=True)
class _Step:
    """What a thread does between two awaits of a user's function."""

    name: str
    thread: int
    started: float
    told: bool = False  # set by the watch


class LoopWatch:
    """Knows the steps in progress; its thread looks at them while there are any calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: set[_Step] = set()
        self._told: set[str] = set()  # names, each once
        self._num_calls = 0  # in progress
        self._num_ended = 0
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    async def run(self, name: str, call: Awaitable[Any]) -> Any:
        """The result of `call`, a coroutine of the function
        `name` (anything else that can be awaited is not watched).
        """
        if not isinstance(call, Coroutine):
            return await call
        with self._calling():
            return await _Stepwise(call, functools.partial(self.step, name))

    def begin(self, name: str, call: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
        """(True, the result) of a coroutine that never waits; else (False, what to await for its result).

        To be called in the task that goes on with it.
        """
        with self._lock:  # most rewards take less time than the context managers below
            step = self._begin_step(name)
            self._start()
        try:
            waits_for = call.send(None)
        except StopIteration as end:
            return True, end.value
        finally:
            self._end_step(step)
        return False, self._go_on(name, call, waits_for)

    async def _go_on(self, name: str, call: Coroutine[Any, Any, Any], waits_for: Any) -> Any:
        with self._calling():
            return await _Stepwise(call, functools.partial(self.step, name), waits_for)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Around what runs on the loop without an await."""
        step = self._begin_step(name)
        try:
            yield
        finally:
            self._end_step(step)

    def _begin_step(self, name: str) -> _Step:
        step = _Step(name, threading.get_ident(), time.monotonic())
        self._steps.add(step)
        return step

    def _end_step(self, step: _Step) -> None:
        self._steps.discard(step)
        self._num_ended += 1
        descriptors.check(step.name)  # now: the loop itself cannot run without them
        seconds = time.monotonic() - step.started
        if seconds > SLOW_STEP_S:
            self._tell(step, f"held up the event loop for {seconds:.1f} s")

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        self._begin_call()
        try:
            yield
        finally:
            self._end_call()

    def _begin_call(self) -> None:
        with self._lock:
            self._num_calls += 1
            self._start()

    def _end_call(self) -> None:
        with self._lock:
            self._num_calls -= 1

    def _start(self) -> None:
        if not self._wake.is_set():  # it stays awake between calls that follow each other
            self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_on, name="loop-watch", daemon=True)
            self._thread.start()

    def _look_on(self) -> None:
        while True:
            self._wake.wait()
            ended = -1
            while self._num_calls or self._steps or self._num_ended != ended:
                ended = self._num_ended
                _dump_if_nobody_runs()
                time.sleep(_LOOK_EVERY_S)
                for step in list(self._steps):
                    seconds = time.monotonic() - step.started
                    if seconds > 2 * SLOW_STEP_S and not step.told:
                        step.told = True
                        self._tell(
                            step,
                            f"has held up the event loop for {seconds:.0f} s so far{_line_of(step.thread)}",
                        )
            with self._lock:
                if not self._num_calls and not self._steps:
                    self._wake.clear()
                    if not _parent_watched:
                        faulthandler.cancel_dump_traceback_later()

    def _tell(self, step: _Step, what: str) -> None:
        if step.name in self._told:
            return
        self._told.add(step.name)
        logger.warning(
            "%s %s: all other samples waited. "
            "Let it `await` what takes long, e.g. asyncio.to_thread(f, ...).",
            step.name,
            what,
        )


class _Stepwise:
    """Awaits a coroutine, with every stretch between two of its awaits inside `step()`.

    `begun`: what it waits for, where it was begun already.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], step: Any, begun: Any = _NOT_BEGUN):
        self._coroutine, self._step, self._begun = coroutine, step, begun

    def __await__(self) -> Generator[Any, Any, Any]:
        resume, value, waits_for = self._coroutine.send, None, self._begun
        while True:
            if waits_for is _NOT_BEGUN:
                with self._step():
                    try:
                        waits_for = resume(value)
                    except StopIteration as end:
                        return end.value
            try:
                resume, value = self._coroutine.send, (yield waits_for)
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:  # a cancellation, or the exception of what was awaited
                resume, value = self._coroutine.throw, error
            waits_for = _NOT_BEGUN


def _line_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    place = traceback.extract_stack(frame)[-1]
    return f" (now at {place.filename}:{place.lineno} in {place.name})"


def _dump_if_nobody_runs() -> None:
    with contextlib.suppress(ValueError, OSError):  # a process whose stderr is closed
        if not _parent_watched and sys.__stderr__ is not None and os.fstat(sys.__stderr__.fileno()):
            faulthandler.dump_traceback_later(_NOBODY_RUNS_S, file=sys.__stderr__)


loop_watch = LoopWatch()
_parent_watched = False  # before it forked this process: faulthandler would wait for a thread of the parent


def _begin_anew() -> None:
    """In a process that was forked: it has not the threads of its parent."""
    global _parent_watched
    _parent_watched = _parent_watched or loop_watch._thread is not None
    vars(loop_watch).update(vars(LoopWatch()))


os.register_at_fork(after_in_child=_begin_anew)
