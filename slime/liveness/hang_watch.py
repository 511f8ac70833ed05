"""Writes the wait table, and ends a run that hangs with the chain of causes.

A run is alive while a wait ends somewhere, a rank moves in its program, or a wait has time left until its own
deadline. A run in which none of this happens for `--timeouts hang` hangs; while its processes compute, it
gets twelve times as long.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_stack
from typing import Protocol

import psutil

from slime.liveness import stacks, waits
from slime.liveness.notes import NotedWait, Notes
from slime.liveness.vital_signs import Signs, SilenceClock, signs_of
from slime.liveness.wait_table import WaitRow, chain_of_causes, row_of, rows_of_this_process, write_table
from slime.utils.errors import RunStopped, WorkerDied
from slime.utils.files.restricted import restricted

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_CPU_LOOK_S = 5.0  # a check of all processes of the run is expensive
_END_TIMEOUT_S = 300.0  # for the driver to stop the run in order
_EXIT_CODE = 70
_SHOWN_S = 10.0
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/_pydevd_bundle/")


class Workers(Protocol):
    """The runtime, as far as the hang watch needs it."""

    def notes(self) -> dict[str, Notes]: ...
    def dump_stacks(self) -> list[str]: ...
    def before_silence(self, explain: Callable[[WorkerDied], None]) -> None: ...


class HangWatch:
    """Watches the driver from one thread. `limit_s` 0: it only writes the table.

    `error`: why it ended the run.
    """

    def __init__(self, run_dir: Path, workers: Workers, limit_s: float):
        self._run_dir, self._workers, self._limit_s = run_dir, workers, limit_s
        self._clock = SilenceClock(limit_s, 3 * _LOOK_S) if limit_s else None
        self.error: RunStopped | None = None
        self._keeps_table = False
        self._shown_until = 0.0  # the table of an explained silence stays for a moment
        self._seen: tuple[int, ...] = ()
        self._signs_at = 0.0
        self._signs: Signs | None = None
        self._ended = threading.Event()
        self._driver = threading.get_ident()
        workers.before_silence(self.explain)
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Surround all work of the driver: a wait that exceeds its deadline ends with the chain of causes."""
        try:
            yield
        except BaseException as error:
            self._keeps_table = isinstance(error, (waits.WaitTimeout, WorkerDied)) or self.error is not None
            if self.error is not None:
                raise self.error from None
            if isinstance(error, waits.WaitTimeout):
                self.explain(error)
            raise

    def close(self) -> None:
        """Stop watching. The table stays as it was if a wait has ended the run."""
        self._ended.set()
        self._thread.join()
        if not self._keeps_table:
            write_table(self._run_dir, [])

    def rows(self) -> list[WaitRow]:
        found = rows_of_this_process()
        for name, notes in self._workers.notes().items():
            found += [
                row_of(name, wait.what, wait.target, wait.age_s, wait.deadline_s) for wait in notes.waits
            ]
        return found

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_LOOK_S):
            now = time.monotonic()
            elapsed_s, last = now - last, now
            try:
                if not self._keeps_table and now > self._shown_until:
                    write_table(self._run_dir, self.rows())
                if self._clock is not None and self.error is None:
                    self._judge(self._clock, elapsed_s)
            except Exception:  # a failed check must not end the run
                logger.exception("The wait table cannot be written; the run continues.")

    def _judge(self, clock: SilenceClock, elapsed_s: float) -> None:
        notes = list(self._workers.notes().values())
        now = (waits.num_ended(), *(worker.moves for worker in notes))
        found: list[waits.Wait | NotedWait] = [*waits.active()]
        found += [wait for worker in notes for wait in worker.waits]
        # A wait within its own deadline is ended by that.
        has_time = any(wait.deadline_s is not None and wait.age_s < wait.deadline_s for wait in found)
        if now != self._seen or has_time or _is_debugged():
            self._seen = now
            clock.hear()
            return
        if time.monotonic() - self._signs_at > _CPU_LOOK_S:
            self._signs_at = time.monotonic()
            family = psutil.Process().children(recursive=True)
            self._signs = signs_of([os.getpid(), *(child.pid for child in family)])
        clock.miss(elapsed_s, self._signs)
        if clock.is_overdue:
            cause = clock.describe().replace("its process does nothing: it hangs", "no process does anything")
            limit = f"--timeouts hang={self._limit_s:g}"
            error = RunStopped(f"nothing moved for {clock.silent_s:.0f} s ({limit}): {cause}")
            self.explain(error)
            self.error = error
            self._end_driver()

    def explain(self, error: RunStopped | waits.WaitTimeout) -> None:
        """Add the chain of causes to an error while all still wait, and make all write their stacks."""
        rows = self.rows()
        if isinstance(error, waits.WaitTimeout):
            rows += rows_of_this_process(error.others)
        self._shown_until = time.monotonic() + _SHOWN_S
        write_table(self._run_dir, rows)
        chain = chain_of_causes(rows)
        causes = ["who waited for whom:\n  " + "\n  ".join(chain)] if chain else []
        log = self._run_dir / "logs" / "driver.log"
        with contextlib.suppress(OSError), open(log, "a", opener=restricted) as file:
            file.write("stacks of the driver, which stops the run:\n")
            stacks.write_own(file)
        dumped = ", ".join(["driver", *self._workers.dump_stacks()])
        causes += [f"stacks of {dumped} are in {self._run_dir}/logs"]
        logger.error("%s", "\n".join(causes))
        error.args = ("\n".join([str(error), *causes]),)

    def _end_driver(self) -> None:
        """Interrupt whatever the driver waits for; `guarding` then raises `error`."""
        if self._driver == threading.main_thread().ident:
            with contextlib.suppress(OSError, ValueError):
                signal.pthread_kill(self._driver, signal.SIGTERM)
        else:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._driver), interrupt)
        if not self._ended.wait(_END_TIMEOUT_S):
            logger.error("The run did not stop within %.0f s; its driver process is killed.", _END_TIMEOUT_S)
            os._exit(_EXIT_CODE)


def _is_debugged() -> bool:
    """Return whether a person is at a breakpoint in this process."""
    frames = (frame for innermost in sys._current_frames().values() for frame, _ in walk_stack(innermost))
    return any(part in frame.f_code.co_filename for frame in frames for part in _DEBUGGERS)
