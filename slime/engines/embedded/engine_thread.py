"""The thread that runs the engine, and the hand-over between it and the asyncio thread that serves HTTP.

Commands and requests wait in an inbox that is emptied between two steps; news for the HTTP side is sent back
with one wake-up per step, however many sequences it concerns.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from slime.engines.embedded.engine import Engine
from slime.engines.embedded.sequence import Sequence

logger = logging.getLogger(__name__)
T = TypeVar("T")
CRASHED = 70  # exit status of an engine whose device is lost


class Listener:
    """The asyncio side of one request: `wait` returns sequences with news, as soon as there are any."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._news: dict[Sequence, None] = {}

    def notify(self, sequence: Sequence) -> None:
        self._news[sequence] = None
        self._event.set()

    async def wait(self) -> list[Sequence]:
        await self._event.wait()
        self._event.clear()
        news, self._news = self._news, {}
        return list(news)


class EngineLoop:
    """Owns the engine. Create it on the asyncio thread; all public methods are called from there."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._listeners: dict[Sequence, Listener] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # -- asyncio thread --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def submit(self, sequences: list[Sequence]) -> Iterator[Listener]:
        """Queue all sequences of a request; those still unfinished when the context ends are aborted."""
        listener = Listener()
        self._listeners |= dict.fromkeys(sequences, listener)
        self._post(lambda: self._add(sequences))
        try:
            yield listener
        finally:
            for sequence in sequences:
                del self._listeners[sequence]
            if not all(sequence.done for sequence in sequences):
                self._post(lambda: self._abort(sequences))

    async def finish(self, sequences: list[Sequence]) -> None:
        """Queue all sequences of a request and wait until each has finished."""
        with self.submit(sequences) as listener:
            while not all(sequence.done for sequence in sequences):
                await listener.wait()

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` on the engine thread between two steps."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except Exception as error:  # raised in the caller: a refused update must not end the engine
                    future.set_exception(error)

        self._post(work)
        return await asyncio.wrap_future(future)

    async def call_and_notify(self, function: Callable[..., list[Sequence]], *arguments: Any) -> None:
        """Like `call`, for functions that end sequences; their listeners are notified."""
        self._notify(await self.call(function, *arguments))

    def _post(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _notify(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence in self._listeners:
                self._listeners[sequence].notify(sequence)

    # -- engine thread ---------------------------------------------------------------------------------------

    def _notify_later(self, changed: list[Sequence]) -> None:
        if changed:
            self._loop.call_soon_threadsafe(self._notify, changed)

    def _add(self, sequences: list[Sequence]) -> None:
        self._notify_later([changed for sequence in sequences for changed in self.engine.add(sequence)])

    def _abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if not sequence.done:
                self.engine.abort_sequence(sequence)

    def _run(self) -> None:
        try:
            while True:
                self._empty_inbox()
                if self.engine.can_step:
                    self._notify_later(self.engine.step())
        except Exception:
            logger.exception("The engine failed in a step and exits; the driver restarts it.")
            os._exit(CRASHED)

    def _empty_inbox(self) -> None:
        """Run the waiting commands; sleep while there is no other work."""
        with self._wake:
            while not self._inbox and not self.engine.can_step:
                self._wake.wait()
        while self._inbox:
            self._inbox.popleft()()
