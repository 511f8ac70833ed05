"""Tells apart a silent process that is stopped, one that hangs, and one that only has much to do.

On a loaded machine silence alone proves little. The operating system knows more: a hanging process uses no
CPU, one that compiles does, and one that gets no turn on a crowded machine is runnable. So the patience with
a silent process depends on what it is seen to do.
"""

from __future__ import annotations

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
    return signs_of(pid for pid in psutil.pids() if _group_of(pid) == leader)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # it has ended
        return None


def family_of(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


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
        if self._signs is None:
            return self._limit_s * _UNSEEN_FACTOR
        busy = self._computes(self._signs) or self._signs.held or self._waits_for_core
        return self._limit_s * (_BUSY_FACTOR if busy and not self._signs.stopped else 1.0)

    @property
    def is_overdue(self) -> bool:
        return self.silent_s >= self.allowed_s

    def describe(self) -> str:
        """Return what is known of the cause, to follow a text that names the process."""
        if self._signs is None:
            return "nothing is known of its process"
        if self._signs.stopped:
            return "its process is stopped (SIGSTOP; SIGCONT resumes it)"
        if self._signs.held:
            return "its process waits for a disk, or for a debugger"
        if self._computes(self._signs):
            return "its process computes and does not answer"
        if self._waits_for_core:
            return "its process waits for a core: too much else runs on its machine"
        return "its process does nothing: it hangs"

    @property
    def _waits_for_core(self) -> bool:
        return self._num_runnable > _RUNNABLE_SHARE * self._num_checks

    def _computes(self, signs: Signs) -> bool:
        return signs.cpu_s - (self._first_cpu_s or 0.0) > _BUSY_SHARE * self.silent_s
