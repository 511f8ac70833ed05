"""A virtual clock: an event loop in which computation takes no time and every wait is skipped.

Exactly one thread runs at any moment, so that a simulation is deterministic. The driver's code waits by
driving the loop; synchronous code of a rollout function runs as a strand, a thread that runs while the loop
waits for it, like one more callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Generic

from slime.liveness import waits
from slime.runtime.base import Future, Handle, Ready, T
from slime.runtime.worker_main import CONTROL
from slime.utils import async_utils
from slime.utils.errors import RunStopped


class Stalled(RunStopped):
    """The simulation is deadlocked: a wait can never end, because no event is scheduled."""


class _Jump(selectors.DefaultSelector):
    """Selector that does not wait, but advances the virtual clock by the timeout."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stalled("the simulated run hangs: it waits, and no event is scheduled.")
        if timeout > 0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._jump.now


class _Ended(BaseException):
    """Raised in a strand whose simulated process has ended."""


class Clock:
    """The virtual event loop, and the threads that wait for it."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self._interrupt: BaseException | None = None
        self._strands: list[Strand] = []

    @property
    def now(self) -> float:
        return self.loop.time()

    def at(self, when: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self.loop.call_at(when, call, *args)

    def interrupt(self, error: BaseException) -> None:
        """Raise this in the driver's current or next wait."""
        self._interrupt = error
        self.loop.stop()

    def wait(self, future: asyncio.Future[Any], deadline_s: float | None = None) -> bool:
        """Let time pass until the future is done; False: the deadline came first."""
        late = math.inf if deadline_s is None else self.now + deadline_s
        timer = None if deadline_s is None else self.at(late, self.loop.stop)
        future.add_done_callback(self._stop)
        try:
            while True:
                if self._interrupt is not None:
                    error, self._interrupt = self._interrupt, None
                    raise error
                if future.done() or self.now >= late:
                    return future.done()
                self.loop.run_forever()
        finally:
            future.remove_done_callback(self._stop)
            if timer is not None:
                timer.cancel()

    def _stop(self, _: object) -> None:
        self.loop.stop()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Replaces `slime.utils.async_utils.run` in a simulated process."""
        strand = _strand_of_thread.get(threading.get_ident())
        if strand is not None:
            return strand.wait_for(coroutine)
        task = self.loop.create_task(coroutine)
        self.wait(task)
        return task.result()

    def strand(self, work: Callable[[], Any], name: str) -> asyncio.Future[Any]:
        strand = Strand(self.loop, work, name)
        self._strands = [s for s in self._strands if not s.future.done()] + [strand]
        return strand.future

    def end_all(self) -> None:
        """End all tasks and strands of the simulated process at once."""
        for strand in self._strands:
            strand.end()
        self._strands = []
        for _ in range(3):  # a cancelled task may start another one
            tasks = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self._interrupt = None
            self.wait(asyncio.gather(*tasks, return_exceptions=True), 1.0)
        self._interrupt = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run coroutines of the whole process on this clock within the block."""
        with async_utils.replaced_by(self.run):
            try:
                yield
            finally:
                self.end_all()
                self.loop.close()


_strand_of_thread: dict[int, Strand] = {}


class Strand:
    """Synchronous code that waits for coroutines, in its own thread; starts at its turn in the loop."""

    def __init__(self, loop: VirtualLoop, work: Callable[[], Any], name: str):
        self._loop, self._work = loop, work
        self.future: asyncio.Future[Any] = loop.create_future()
        self._its_turn, self._our_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        if not self._ended:
            self._thread.start()
            self._our_turn.acquire()

    def _main(self) -> None:
        _strand_of_thread[threading.get_ident()] = self
        try:
            result, error = self._work(), None
        except _Ended:
            result, error = None, None
        except BaseException as raised:  # any exception is passed to the caller
            result, error = None, raised
        finally:
            del _strand_of_thread[threading.get_ident()]
        if not self._ended:
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)
        self._our_turn.release()

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the loop until the coroutine is done; called in the strand."""
        if self._ended:
            coroutine.close()
            raise _Ended
        task = self._loop.create_task(coroutine)
        task.add_done_callback(self._resume)
        self._our_turn.release()
        self._its_turn.acquire()
        if self._ended:
            raise _Ended
        return task.result()

    def _resume(self, _: object) -> None:
        if not self._ended:
            self._its_turn.release()
            self._our_turn.acquire()

    def end(self) -> None:
        self._ended = True
        if self._thread.is_alive():
            self._its_turn.release()
            self._our_turn.acquire()
        self.future.cancel()


class VirtualFuture(Generic[T]):
    """A result that is available after some virtual time (a `slime.runtime.base.Future`)."""

    def __init__(self, clock: Clock, future: asyncio.Future[T], name: str):
        self._clock, self._future, self._name = clock, future, name

    def done(self) -> bool:
        return self._future.done()

    def result(self, deadline_s: float | None = None, /) -> T:
        if not self._clock.wait(self._future, deadline_s):
            raise waits.WaitTimeout(f"{self._name}: not done after {deadline_s} s")
        return self._future.result()


class ModelledHandle(Handle[T]):
    """Handle of an object on the virtual clock, whose methods take virtual time.

    `strands`: methods of the work lane are synchronous code that waits for coroutines, one call after
    another.
    """

    def __init__(self, clock: Clock, target: T, name: str, *, strands: bool = False):
        self.name, self._clock, self._target, self._strands = name, clock, target, strands
        self._last: asyncio.Future[Any] | None = None

    def send(self, lane: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        call = getattr(self._target, method)
        name = f"{self.name}.{method}"
        if self._strands and lane != CONTROL:
            before, loop = self._last, self._clock.loop

            async def in_order() -> Any:
                if before is not None:
                    await asyncio.wait([before])
                return await self._clock.strand(lambda: call(*args, **kwargs), name)

            self._last = loop.create_task(in_order())
            return VirtualFuture(self._clock, self._last, name)
        value = call(*args, **kwargs)
        if isinstance(value, Awaitable):
            task = asyncio.ensure_future(value, loop=self._clock.loop)
            return VirtualFuture(self._clock, task, name)
        return Ready(value)

    def kill(self) -> None:
        """Do nothing: the object lives in this process."""
