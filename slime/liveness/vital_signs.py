"""Tells apart a silent process that is stopped, one that hangs, and one that only has much to do.

On a loaded machine silence alone proves little: a hanging process uses no CPU, one that compiles does, and
one that gets no turn is runnable. So the patience with a silent process depends on what it is seen to do.
"""

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

_BUSY_SHARE = 0.02  # of one core, over the silence: threads that only wait use less
_RUNNABLE_SHARE = 0.5  # of the checks: a thread that only wakes up now and then is rarely seen running
# How many times the limit a silence may last.
_BUSY_FACTOR, _UNSEEN_FACTOR = 12.0, 3.0


@dataclass(frozen=True, slots=True)
class Signs:
    """The state of a process, or of several together, as the operating system reports it.

    `stopped`: by SIGSTOP, or from a terminal. `held`: by a debugger, or waiting for a disk. `wants_core`: a
    thread runs, or could run and waits for a core.
    """

    stopped: bool
    held: bool
    cpu_s: float
    wants_core: bool = False


def signs_of(pids: Iterable[int]) -> Signs | None:
    """Return the signs of these processes together; None if none of them can be seen."""
    own = threading.get_native_id()  # the thread that checks always runs
    states, cpu_s, found = set[str](), 0.0, False
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            times = process.cpu_times()
            cpu_s, found = cpu_s + times.user + times.system, True
            # Thread by thread: a debugger or a disk may hold a single one.
            for thread in process.threads():
                if thread.id != own:
                    with contextlib.suppress(psutil.Error):
                        states.add(psutil.Process(thread.id).status())
    held = {psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP} & states
    stopped, runs = psutil.STATUS_STOPPED in states, psutil.STATUS_RUNNING in states
    return Signs(stopped, bool(held), cpu_s, runs) if found else None


def signs_of_group(leader: int) -> Signs | None:
    """Return the signs of all processes in the process group of `leader`."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(pid) == leader:
                members.append(pid)
    return signs_of(members)


class SilenceClock:
    """Measures how long a process has been silent, and whether that is too long.

    A single missed check counts at most `longest_step_s`, so that time in which the watcher itself was
    suspended is not counted.
    """

    def __init__(self, limit_s: float, longest_step_s: float):
        self._limit_s, self._longest_step_s = limit_s, longest_step_s
        self.hear()

    def hear(self) -> None:
        """Record a sign of life."""
        self.silent_s = 0.0
        self._signs: Signs | None = None
        self._first_cpu_s: float | None = None
        self._num_runnable = self._num_checks = 0

    def miss(self, elapsed_s: float, signs: Signs | None) -> None:
        """Record a check without a sign of life, `elapsed_s` after the last check."""
        self.silent_s += min(elapsed_s, self._longest_step_s)
        self._signs = signs
        if signs is not None:
            self._num_runnable += signs.wants_core
            self._num_checks += 1
            if self._first_cpu_s is None:
                self._first_cpu_s = signs.cpu_s

    @property
    def allowed_s(self) -> float:
        return self._limit_s * self._verdict()[0]

    @property
    def is_overdue(self) -> bool:
        return self.silent_s >= self.allowed_s

    def describe(self) -> str:
        """Return what is known of the cause, to follow a text that names the process."""
        return self._verdict()[1]

    def _verdict(self) -> tuple[float, str]:
        """Return how many times the limit the silence may last, and the cause."""
        signs = self._signs
        if signs is None:
            return _UNSEEN_FACTOR, "nothing is known of its process"
        if signs.stopped:
            return 1.0, "its process is stopped (SIGSTOP; SIGCONT resumes it)"
        if signs.held:
            return _BUSY_FACTOR, "its process waits for a disk, or for a debugger"
        if signs.cpu_s - (self._first_cpu_s or 0.0) > _BUSY_SHARE * self.silent_s:
            return _BUSY_FACTOR, "its process computes and does not answer"
        if self._num_runnable > _RUNNABLE_SHARE * self._num_checks:
            return _BUSY_FACTOR, "its process waits for a core: too much else runs on its machine"
        return 1.0, "its process does nothing: it hangs"
