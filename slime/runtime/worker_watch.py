"""Holds and watches the workers of a runtime: reports the first that dies, or is silent for too long."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import math
import threading
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from slime.liveness.heartbeat import HeartbeatWatch
from slime.liveness.notes import Notes
from slime.liveness.vital_signs import Signs
from slime.runtime.base import Call, Handle, T, WorkerSpec
from slime.utils.errors import WorkerDied

logger = logging.getLogger(__name__)

DEFAULT_LIMIT_S = 60.0
_FIRST_WARNING = 0.25  # of the limit


class WorkerSilent(WorkerDied):
    """A process of the run exists and gives no sign of life."""


class WorkerHandle(Handle[T]):
    """A process of its own, with the calls that it has not answered; a `Beating` for the watch."""

    def __init__(self, spec: WorkerSpec):
        self.name, self.notes, self.is_replaceable = spec.name, Notes(), spec.replaceable
        self.is_anywhere = spec.anywhere
        self.end: concurrent.futures.Future[WorkerDied] = concurrent.futures.Future()  # how it has ended
        self.ended_here = False  # on purpose: set before it is killed
        self._ids = itertools.count()
        self._calls: dict[int, Call[Any]] = {}
        self._gone: WorkerDied | None = None  # why it answers no more
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def title(self) -> str: ...
    @abstractmethod
    async def heard(self, timeout_s: float) -> bool | None: ...
    @abstractmethod
    def signs(self) -> Signs | None: ...

    def _begin(self, method: str) -> tuple[int, Call[Any]]:
        """Note a call that is about to be sent; it has failed already if the process is gone."""
        call_id, call = next(self._ids), Call[Any](self.name, method)
        with self._lock:
            if self._gone is None:
                self._calls[call_id] = call
            else:
                call.set_exception(self._gone)
        return call_id, call

    def _answer(self, call_id: int, ok: bool, value: Any) -> None:
        with self._lock:
            call = self._calls.pop(call_id, None)
        if call is None:
            return  # given up: its worker was silent for too long
        if ok:
            call.set_result(value)
        else:
            call.set_exception(value)

    def fail(self, error: WorkerDied | None) -> None:
        """Make its calls fail, those in progress and later ones; None: it answers again."""
        with self._lock:
            self._gone = error
            calls, self._calls = ({}, self._calls) if error is None else (self._calls, {})
        for call in calls.values():
            call.set_exception(error)


W = TypeVar("W", bound=WorkerHandle[Any])


class RuntimeWithWorkers(Generic[W]):
    """Holds and watches the worker processes that a runtime has started.

    `failure` gets the first worker that died, or is silent for too long. `silence_limit_s` 0: silence is no
    failure.
    """

    def __init__(self, run_dir: Path, silence_limit_s: float):
        self._run_dir, self._silence_limit_s, self._workers = run_dir, silence_limit_s, list[W]()
        self._explain: Callable[[WorkerSilent], None] = lambda error: None  # set by who can explain it
        self._failure: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._lock, self._closed = threading.Lock(), False
        limit_s = silence_limit_s or math.inf
        self._heartbeats: HeartbeatWatch[W] = HeartbeatWatch(
            limit_s, self._give_up, lambda worker: worker.fail(None), warn_after_s=limit_s * _FIRST_WARNING
        )

    @property
    def log_folder(self) -> Path:
        return self._run_dir / "logs"

    @property
    def failure(self) -> concurrent.futures.Future[None]:
        return self._failure

    def forget_failure(self) -> None:
        with self._lock:
            self._failure = concurrent.futures.Future()

    def before_silence(self, explain: Callable[[WorkerDied], None]) -> None:
        self._explain = explain

    def notes(self) -> dict[str, Notes]:
        return {worker.name: worker.notes for worker in self._living()}

    def close(self) -> None:
        self._closed = True
        self._heartbeats.close()
        workers, self._workers = self._workers, []
        for worker in reversed(workers):
            worker.kill()

    def _hold(self, worker: W) -> None:
        self._heartbeats.add(worker)
        worker.end.add_done_callback(lambda end: self._see_end(worker, end.result()))
        self._workers.append(worker)

    def _living(self) -> list[W]:
        return [worker for worker in self._workers if not worker.end.done()]

    def _give_up(self, worker: W, cause: str) -> None:
        limit = f"--timeouts worker-silence={self._silence_limit_s:g}"
        error = WorkerSilent(f"{worker.title} has not answered for {cause} ({limit})")
        logger.error("%s", error)
        try:
            self._explain(error)  # first: while all still wait, which shows for whom
        except Exception:
            logger.exception("The chain of causes cannot be reported.")
        worker.fail(error)
        if not worker.is_replaceable:
            self._fail(error)

    def _see_end(self, worker: W, death: WorkerDied) -> None:
        """Runs in the thread that saw the end, without waiting for the next heartbeat."""
        self._heartbeats.remove(worker)
        if not (worker.ended_here or worker.is_replaceable or self._closed):
            self._fail(death)

    def _fail(self, error: WorkerDied) -> None:
        with self._lock:
            if not self._failure.done():
                self._failure.set_exception(error)
