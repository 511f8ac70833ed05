"""Heartbeats of workers: a call may take as long as it needs, but a silent process is told by name.

Each worker has a thread that answers for it beside its work, so a long step is no silence. A stopped process,
and one that hangs with Python's lock held, is: it is warned of, and after the limit its calls fail with what
is known of the cause. One that ends is told of by that event itself, whether or not somebody waits for it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from slime.observability.wait_table import SIGN_OF_LIFE
from slime.runtime.base import WorkerDied
from slime.runtime.worker_main import BEAT_S
from slime.utils import waits
from slime.utils.machine.vital_signs import Signs, SilenceClock

logger = logging.getLogger(__name__)

DEFAULT_LIMIT_S = 60.0
_FIRST_WARNING = 0.25  # of the limit; then at twice the silence each time
_MISSED_BEATS = 3  # from then on it is in the table of waits


class WorkerSilent(WorkerDied):
    """A process of the run is there and gives no sign of life."""


class Beating(Protocol):
    """A worker as the watch sees it."""

    name: str
    end: concurrent.futures.Future[WorkerDied]  # done as soon as it has ended: how
    ended_here: bool  # on purpose: set before it is killed

    @property
    def title(self) -> str:
        """Its name, and its process where that is known."""

    def heard(self) -> bool:
        """Whether it gave a sign of life since the last question."""

    def signs(self) -> Signs | None:
        """What the system says of its process; None: it cannot be seen from here."""

    def fail(self, error: WorkerSilent | None) -> None:
        """Its calls, those under way and later ones, end with this error; None: it answers again."""


class _Watched:
    def __init__(self, worker: Beating, limit_s: float, give_up: Callable[[Beating, WorkerSilent], None]):
        self.worker, self._limit_s, self._give_up = worker, limit_s, give_up
        self._clock = SilenceClock(limit_s, 3 * BEAT_S)
        self._next_warning_s = limit_s * _FIRST_WARNING
        self._failed = False

    def look(self, elapsed_s: float) -> None:
        if self.worker.heard():
            self._hear()
            return
        self._clock.miss(elapsed_s, self.worker.signs())
        self._mark()
        if self._clock.is_overdue and not self._failed:
            self._failed = True
            error = WorkerSilent(f"{self._told()} (--worker-silence-timeout-s {self._limit_s:g})")
            logger.error("%s", error)
            self._give_up(self.worker, error)
        elif self._clock.silent_s >= self._next_warning_s:
            self._next_warning_s *= 2
            logger.warning("%s", self._told())

    def _mark(self) -> None:
        """Enters the worker in the table of waits, once more than a beat or two is missing."""
        silent_s = self._clock.silent_s
        if silent_s >= _MISSED_BEATS * BEAT_S:
            started = time.monotonic() - silent_s
            what = f"{SIGN_OF_LIFE} ({self._clock.describe()})"
            deadline_s = self._clock.allowed_s if self._limit_s < math.inf else None
            waits.mark(self, waits.Wait(what, "the watch", started, deadline_s, self.worker.name))

    def leave(self) -> None:
        waits.mark(self, None)

    def _hear(self) -> None:
        waits.mark(self, None)
        if self._failed:
            self._failed = False
            self.worker.fail(None)
        if self._clock.silent_s >= self._limit_s * _FIRST_WARNING:  # now: whoever reads it may call
            logger.warning("%s answers again after %.0f s", self.worker.title, self._clock.silent_s)
        self._clock.hear()
        self._next_warning_s = self._limit_s * _FIRST_WARNING

    def _told(self) -> str:
        return (
            f"{self.worker.title} has not answered for {self._clock.silent_s:.0f} s: {self._clock.describe()}"
        )


class HeartbeatWatch:
    """One thread for all workers of a runtime. `failure` gets the first that died, or is silent for too long.

    `limit_s` 0: silence is no failure. `on_silence`: called before the calls of a silent worker are given up.
    """

    def __init__(self, limit_s: float = DEFAULT_LIMIT_S):
        self._limit_s = limit_s or math.inf
        self.on_silence: Callable[[WorkerSilent], None] = lambda error: None  # set by who can tell more
        self.failure: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._watched: list[_Watched] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, worker: Beating) -> None:
        watched = _Watched(worker, self._limit_s, self._give_up)
        with self._lock:
            self._watched.append(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
                self._thread.start()
        worker.end.add_done_callback(lambda end: self._bury(watched, end.result()))

    def forget_failure(self) -> None:
        """Who was silent has been replaced: `failure` is for the next one."""
        with self._lock:
            self.failure = concurrent.futures.Future()

    def close(self) -> None:
        self._closed.set()

    def _give_up(self, worker: Beating, error: WorkerSilent) -> None:
        """Tells of the silence while all still wait, which shows for whom; then gives the worker up."""
        try:
            self.on_silence(error)
        except Exception:  # what happened matters more than what can be told of it
            logger.exception("the chain of causes cannot be told")
        worker.fail(error)
        with self._lock:
            self._fail(error)

    def _fail(self, error: WorkerDied) -> None:
        """Notes that a worker has ended. The caller holds the lock: workers end on threads of their own."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def _bury(self, watched: _Watched, death: WorkerDied) -> None:
        """The end itself calls this, on the thread that saw it: no look of the watch comes between."""
        with self._lock:
            self._watched.remove(watched)
            watched.leave()
            # Asked here: who is ended because another was lost is no failure of those that come after.
            if not watched.worker.ended_here and not self._closed.is_set():
                self._fail(death)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(BEAT_S):
            now = time.monotonic()
            elapsed_s, last = now - last, now
            for one in list(self._watched):
                one.look(elapsed_s)
                if one.worker.end.done():  # meanwhile: it has no wait any more
                    one.leave()
        for one in self._watched:
            one.leave()
