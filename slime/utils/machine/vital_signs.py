"""Whether a process that does not answer is stopped, hangs, or only has much to do.

Silence alone tells little on a loaded machine. The system knows more: a stopped process says so, one that
hangs uses no CPU, one that compiles or reads from a slow disk does, and one that gets no turn on a crowded
machine stands in line for it. So patience depends on what is seen.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATE, _PARENT, _GROUP, _USER_TIME, _SYSTEM_TIME = 0, 1, 2, 11, 12  # fields of `stat` behind the name
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_BUSY_SHARE = 0.02  # of one core, over the silence: threads that only wait use less
_IN_LINE_SHARE = 0.5  # of the looks
# How many times the limit a silence may last.
_BUSY_FACTOR, _UNSEEN_FACTOR = 12.0, 3.0


@dataclass(frozen=True, slots=True)
class Signs:
    """What the system says of a process or a group of them.

    `stopped`: by SIGSTOP, or from a terminal. `held`: by a
    debugger, or waiting for a disk: its silence is no hang. `wants_core`: a thread could run
    and waits for its turn, or runs.
    """

    stopped: bool
    held: bool
    cpu_s: float
    wants_core: bool = False


def signs_of(pids: Iterable[int]) -> Signs | None:
    """The signs of these processes together; None where the system does not tell, or all are gone."""
    own = str(threading.get_native_id())  # the thread that looks always runs
    found = {thread: row for pid in pids for thread, row in _rows_of(pid)}
    if not found:
        return None
    rows, states = found.values(), {row[_STATE] for thread, row in found.items() if thread != own}
    ticks = sum(int(row[_USER_TIME]) + int(row[_SYSTEM_TIME]) for row in rows)
    return Signs("T" in states, bool(states & {"t", "D"}), ticks / _TICKS_PER_S, "R" in states)


def signs_of_group(leader: int) -> Signs | None:
    """The signs of a process that leads a group, with all that it has started there."""
    members = []
    for entry in _PROC.glob("[0-9]*"):
        row = _read_stat(entry / "stat")
        if row is not None and int(row[_GROUP]) == leader:
            members.append(int(entry.name))
    return signs_of(members)


def family_of(pid: int) -> list[int]:
    """A process and all that it has started, and so on, as far as the system tells."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        row = _read_stat(entry / "stat")
        if row is not None:
            children.setdefault(int(row[_PARENT]), []).append(int(entry.name))
    found, left = list[int](), [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def _rows_of(pid: int) -> list[tuple[str, list[str]]]:
    """One per thread, with its number: a debugger or a disk may hold a single one."""
    rows = ((task.name, _read_stat(task / "stat")) for task in (_PROC / str(pid) / "task").glob("[0-9]*"))
    return [(thread, row) for thread, row in rows if row is not None]


def _read_stat(path: Path) -> list[str] | None:
    with contextlib.suppress(OSError):
        # The name in parentheses may hold spaces and parentheses.
        return path.read_text(errors="replace").rpartition(")")[2].split() or None
    return None


class SilenceClock:
    """How long somebody has been silent, and whether that is too
    long. Time in which the asker itself slept is not counted.
    """

    def __init__(self, limit_s: float, longest_step_s: float):
        self._limit_s, self._longest_step_s = limit_s, longest_step_s
        self.hear()

    def hear(self) -> None:
        self.silent_s = 0.0
        self._signs: Signs | None = None
        self._first_cpu_s: float | None = None
        self._num_in_line = self._num_asked = 0  # how often it wanted a core, of how many looks

    def miss(self, elapsed_s: float, signs: Signs | None) -> None:
        """Asked and not answered, this long after the last time."""
        self.silent_s += min(elapsed_s, self._longest_step_s)
        self._signs = signs
        if signs is not None:
            self._num_in_line, self._num_asked = self._num_in_line + signs.wants_core, self._num_asked + 1
        if signs is not None and self._first_cpu_s is None:
            self._first_cpu_s = signs.cpu_s

    @property
    def allowed_s(self) -> float:
        if self._signs is None:
            return self._limit_s * _UNSEEN_FACTOR
        busy = self._computes(self._signs) or self._signs.held or self._is_in_line
        return self._limit_s * (_BUSY_FACTOR if busy and not self._signs.stopped else 1.0)

    @property
    def is_overdue(self) -> bool:
        return self.silent_s >= self.allowed_s

    def describe(self) -> str:
        """What is known of the cause, for a message that says who and how long."""
        if self._signs is None:
            return "nothing is known of its process"
        if self._signs.stopped:
            return "its process is stopped (SIGSTOP; SIGCONT lets it go on)"
        if self._signs.held:
            return "its process waits for a disk, or for a debugger"
        if self._computes(self._signs):
            return "its process computes and does not answer"
        if self._is_in_line:
            return "its process waits for a core: too much else runs on its machine"
        return "its process does nothing: it hangs"

    @property
    def _is_in_line(self) -> bool:
        """Seen in most looks: a thread that only wakes up now and then is rarely met."""
        return self._num_in_line > _IN_LINE_SHARE * self._num_asked

    def _computes(self, signs: Signs) -> bool:
        used_s = signs.cpu_s - (self._first_cpu_s or 0.0)
        return used_s > _BUSY_SHARE * self.silent_s
