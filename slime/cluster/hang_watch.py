"""Writes the table of waits, and ends a run that stands still with the chain of causes.

What counts is silence, not time: while a wait ends somewhere, a rank is seen at another place of its program
or a wait has time left until its own deadline, the run lives; while its processes compute, it gets twelve
times as long. Only a run in which nothing of the sort happens for `--hang-timeout-s` hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from slime.observability.wait_table import (
    WaitRow,
    chain_of_causes,
    row_of,
    rows_of_this_process,
    write_table,
)
from slime.runtime.base import Runtime, WorkerDied
from slime.runtime.notes import Notes
from slime.utils import waits
from slime.utils.errors import RunStopped
from slime.utils.files.restricted import restricted
from slime.utils.machine import stacks
from slime.utils.machine.vital_signs import Signs, SilenceClock, family_of, signs_of

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_CPU_LOOK_S = 5.0  # of all processes of the run: a walk over /proc
_END_PATIENCE_S = 300.0  # of the driver, to take the run down in order
_EXIT_CODE = 70
_SHOWN_S = 10.0
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/_pydevd_bundle/")


class RunHangs(RunStopped):
    """The run ends because nothing moved for too long."""


class HangWatch:
    """One thread beside the driver's loop. `limit_s` 0: it writes the table and ends nothing.

    `error`: why the run was ended.
    """

    def __init__(self, run_dir: Path, runtime: Runtime, limit_s: float):
        self._run_dir, self._runtime, self._limit_s = run_dir, runtime, limit_s
        self._clock = SilenceClock(limit_s, 3 * _LOOK_S) if limit_s else None
        self.error: RunHangs | None = None
        self._keeps_table = False
        self._shown_until = 0.0  # what was explained stays in the table for a moment, or for good
        self._seen: tuple[int, ...] = ()
        self._signs_at = 0.0
        self._signs: Signs | None = None
        self._ended = threading.Event()
        self._driver = threading.get_ident()
        runtime.before_silence(self.explain)
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Around all that the driver does: a wait that came to its deadline ends with the chain of causes."""
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
        """The table of a run that a wait has ended stays as it was when that was told."""
        self._ended.set()
        self._thread.join()
        if not self._keeps_table:
            write_table(self._run_dir, [])

    # -- what is known

    def rows(self) -> list[WaitRow]:
        found = rows_of_this_process()
        for name, notes in self._runtime.notes().items():
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
            except Exception:  # a look that fails must not end the run
                logger.exception("the table of waits cannot be written")

    def _judge(self, clock: SilenceClock, elapsed_s: float) -> None:
        notes = list(self._runtime.notes().values())
        now = (waits.num_ended(), *(worker.moves for worker in notes))
        if now != self._seen or _has_time_left(notes) or _is_debugged():
            self._seen = now
            clock.hear()
            return
        if time.monotonic() - self._signs_at > _CPU_LOOK_S:
            self._signs_at = time.monotonic()
            self._signs = signs_of(family_of(os.getpid()))
        clock.miss(elapsed_s, self._signs)
        if clock.is_overdue:
            said = clock.describe().replace("its process does nothing: it hangs", "no process does anything")
            error = RunHangs(
                f"nothing moved for {clock.silent_s:.0f} s (--hang-timeout-s {self._limit_s:g}): {said}"
            )
            self.explain(error)
            self.error = error
            self._end_driver()

    # -- the end

    def explain(self, error: RunStopped | WorkerDied | waits.WaitTimeout) -> None:
        """While all still wait: the error gets the chain of causes, and all write their stacks."""
        rows = self.rows()
        if isinstance(error, waits.WaitTimeout):
            rows += rows_of_this_process(error.others)
        self._shown_until = time.monotonic() + _SHOWN_S
        write_table(self._run_dir, rows)
        chain = chain_of_causes(rows)
        asked = self._dump_stacks()
        told = [f"stacks of {', '.join(asked)} are in {self._run_dir}/logs"]
        if chain:
            told.insert(0, "who waited for whom:\n  " + "\n  ".join(chain))
        logger.error("%s", "\n".join(told))
        error.args = ("\n".join([str(error), *told]),)

    def _dump_stacks(self) -> list[str]:
        log = self._run_dir / "logs" / "driver.log"
        with contextlib.suppress(OSError), open(log, "a", opener=restricted) as file:
            file.write("stacks of the driver, which stops the run:\n")
            stacks.write_own(file)
        return ["driver", *self._runtime.dump_stacks()]

    def _end_driver(self) -> None:
        """Interrupts whatever the driver waits for; `open_cluster` then raises `error`."""
        if self._driver == threading.main_thread().ident:
            with contextlib.suppress(OSError, ValueError):
                signal.pthread_kill(self._driver, signal.SIGTERM)
        else:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._driver), interrupt)
        if not self._ended.wait(_END_PATIENCE_S):
            logger.error(
                "the run did not end in %.0f s after it was told to: it is given up", _END_PATIENCE_S
            )
            os._exit(_EXIT_CODE)


def _has_time_left(workers: Iterable[Notes]) -> bool:
    """Somebody waits within his own deadline, which ends that wait by itself."""
    ages = [(wait.age_s, wait.deadline_s) for wait in waits.active()]
    ages += [(wait.age_s, wait.deadline_s) for notes in workers for wait in notes.waits]
    return any(deadline_s is not None and age_s < deadline_s for age_s, deadline_s in ages)


def _is_debugged() -> bool:
    """A person looks at a breakpoint in this process."""
    return any(_is_in_debugger(frame) for frame in sys._current_frames().values())


def _is_in_debugger(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _DEBUGGERS):
            return True
        frame = frame.f_back
    return False
