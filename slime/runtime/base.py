"""Handles, futures and refs: all that the cluster needs to know about where its parts run.

A handle has lanes: calls on one lane run one after another, calls on different lanes do not wait for each
other, so that a health question or a save never queues behind a long generation.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime.runtime.placement import Placement, Slot
from slime.utils import waits
from slime.utils.errors import RunStopped

WORK, CONTROL = "work", "control"
_LOOK_S = 1.0


class WorkerDied(RunStopped):
    """A process of the run ended while somebody waited for it."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How one object is placed. `slot` None: on the driver's machine, without a device.

    `near_driver`: it may live in the driver's own process (a debugger
    works there), which then sees every device.
    """

    name: str
    slot: Slot | None = None
    env: dict[str, str] = field(default_factory=dict)
    near_driver: bool = False


class Future(Protocol):
    """The answer to a call, later."""

    def done(self) -> bool: ...

    def result(self, deadline_s: float | None = None) -> Any:
        """The answer, or the exception the call raised; `WorkerDied` if the process ended."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A future whose answer is there."""

    value: Any

    def done(self) -> bool:
        return True

    def result(self, deadline_s: float | None = None) -> Any:
        return self.value


class Handle(Protocol):
    """An object that lives somewhere."""

    name: str

    def call(self, method: str, *args: Any, lane: str = WORK) -> Future: ...

    def kill(self) -> None: ...


class Runtime(Protocol):
    """Where objects live: child processes of this one, or Ray actors. One
    that is handed on spawns like the first.
    """

    @property
    def num_machines(self) -> int:
        """How many a plan may use."""

    def claim(self, placement: Placement) -> Placement:
        """Takes the machines and devices that a plan needs, until
        `close`; returns it with their real names.
        """

    @property
    def failure(self) -> concurrent.futures.Future:
        """Gets the error of a worker that is silent for too long, whether or not somebody waits for it."""

    def spawn(self, cls: type, *args: Any, spec: WorkerSpec) -> Handle: ...

    def put(self, value: Any) -> Any:
        """A reference that any worker can turn back into the value with `slime.runtime.base.fetch`."""

    def drop(self, ref: Any) -> None:
        """The value is no longer needed."""

    def close(self) -> None:
        """Ends every worker; safe to call twice."""


def gather(futures: Sequence[Future], deadline_s: float | None = None) -> list[Any]:
    """All answers, or the first failure: ranks that wait in a collective for a failed one never answer."""
    started, waiting_for = time.monotonic(), list(futures)
    pause_s = 0.0005
    while waiting_for:
        done = [future for future in waiting_for if future.done()]
        for future in done:
            future.result(0)
        waiting_for = [future for future in waiting_for if future not in done]
        left = None if deadline_s is None else deadline_s - (time.monotonic() - started)
        if waiting_for and left is not None and left <= 0:
            waiting_for[0].result(0)  # raises the named timeout
        if len(waiting_for) == 1 and not done:
            waiting_for[0].result(left)
        elif waiting_for:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)
    return [future.result(0) for future in futures]


class Guarded:
    """A future that also ends when `failure` does: what it waits for would come to nothing."""

    def __init__(self, inner: Future, failure: concurrent.futures.Future):
        self._inner, self._failure = inner, failure

    def done(self) -> bool:
        return self._inner.done() or self._failure.done()

    def result(self, deadline_s: float | None = None) -> Any:
        started = time.monotonic()
        while True:
            if self._failure.done():
                self._failure.result()
            left = None if deadline_s is None else deadline_s - (time.monotonic() - started)
            try:
                return self._inner.result(_LOOK_S if left is None else max(0.0, min(_LOOK_S, left)))
            except waits.WaitTimeout:
                if self._inner.done():
                    raise  # of the call itself
                if left is not None and left <= _LOOK_S:
                    raise


def in_background(work: Callable[[], Any], name: str) -> concurrent.futures.Future:
    """Runs `work` on a daemon thread: what never ends cannot keep the driver alive."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def call() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whatever was raised belongs to the caller
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future


def fetch(ref: Any) -> Any:
    """The value behind a reference made by `Runtime.put`, in any process of the run."""
    return ref.load()
