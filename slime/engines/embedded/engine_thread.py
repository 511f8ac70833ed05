"""The thread that runs the engine, and the hand-over between it and the asyncio thread that serves HTTP.

Commands and requests wait in an inbox that is emptied between two steps; what HTTP must hear goes back with
one wake-up per step, however many sequences it concerns.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from slime.engines.embedded.engine import Engine
from slime.engines.embedded.sequence import Sequence, failure

logger = logging.getLogger(__name__)
T = TypeVar("T")
CRASHED = 70  # exit status of an engine whose device is lost


class Listener:
    """The asyncio side of one request: `wait` returns when there is news, with the sequences it is of."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._news: list[Sequence] = []

    def notify(self, sequence: Sequence) -> None:
        self._news.append(sequence)
        self._event.set()

    async def wait(self) -> list[Sequence]:
        await self._event.wait()
        self._event.clear()
        news, self._news = self._news, []
        return news


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

    def submit(self, sequences: list[Sequence]) -> Listener:
        """Queue all sequences of a request, one behind the other."""
        listener = Listener()
        for sequence in sequences:
            self._listeners[sequence] = listener
        self._post(lambda: self._add_all(sequences))
        return listener

    def forget(self, sequence: Sequence) -> None:
        """Nobody listens any more (the answer is sent, or the client has gone: then it is aborted)."""
        self._listeners.pop(sequence, None)
        if not sequence.done:
            self._post(lambda: self._abort_one(sequence))

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` on the engine thread between two steps."""
        future: asyncio.Future[T] = self._loop.create_future()

        def work() -> None:
            try:
                result = function(*arguments)
            except Exception as error:  # the caller gets it: a refused update must not end the engine
                self._loop.call_soon_threadsafe(_set_exception, future, error)
            else:
                self._loop.call_soon_threadsafe(_set_result, future, result)

        self._post(work)
        return await future

    async def call_and_tell(self, function: Callable[..., list[Sequence]], *arguments: Any) -> None:
        """Like `call`, for functions that end sequences: their listeners hear of it."""
        self._tell(await self.call(function, *arguments))

    def _post(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _tell(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            listener = self._listeners.get(sequence)
            if listener is not None:
                listener.notify(sequence)

    # -- engine thread ---------------------------------------------------------------------------------------

    def _tell_later(self, heard: list[Sequence]) -> None:
        if heard:
            self._loop.call_soon_threadsafe(self._tell, heard)

    def _add_all(self, sequences: list[Sequence]) -> None:
        self._tell_later([heard for sequence in sequences for heard in self._add(sequence)])

    def _add(self, sequence: Sequence) -> list[Sequence]:
        try:
            return self.engine.add(sequence)
        except Exception as error:  # the request's, not the engine's
            logger.exception("a request could not be queued")
            sequence.finish = failure(500, f"not queued: {type(error).__name__}: {error}", "NotQueued")
            return [sequence]

    def _abort_one(self, sequence: Sequence) -> None:
        if not sequence.done:
            self.engine.abort_sequence(sequence)

    def _run(self) -> None:
        try:
            while True:
                self._empty_inbox()
                if self.engine.can_step:
                    self._tell_later(self.engine.step())
        except Exception:
            logger.exception("the engine cannot go on; it stops")
            os._exit(CRASHED)

    def _empty_inbox(self) -> None:
        """Do what waits; sleep while there is nothing else to do."""
        with self._wake:
            while not self._inbox and not self.engine.can_step:
                self._wake.wait()
        while self._inbox:
            self._inbox.popleft()()


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
