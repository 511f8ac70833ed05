"""What a worker tells of itself with every sign of life: what it waits for, and where its work stands still.

Collectives are not wrapped one by one: wherever torch or Megatron begin them, the thread that works is seen
to stand at the same place, inside `torch.distributed`, from one look to the next.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from slime.runtime.reports import Report, drain_reports
from slime.utils import waits

OTHER_RANKS = "the other ranks"
_COLLECTIVES = ("/torch/distributed/", "/megatron/core/pipeline_parallel/p2p_communication")
_DEPTH = 12  # frames above the innermost among which a collective is looked for


@dataclass(frozen=True, slots=True)
class NotedWait:
    """A wait of a worker, as it travels: clocks of machines differ, so it has an age."""

    what: str
    target: str
    age_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Notes:
    """`moves`: how often its threads were seen at another place, and how many of its waits have ended.
    `reports`: its errors and warnings since the last sign of life.
    """

    moves: int = 0
    waits: list[NotedWait] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)


class _Call:
    """A call under way in one thread."""

    __slots__ = ("method", "place", "since")

    def __init__(self, method: str):
        self.method, self.since = method, time.monotonic()
        self.place: object = None  # where the last look found it


_calls: dict[int, _Call] = {}  # by thread


@contextlib.contextmanager
def working(method: str) -> Iterator[None]:
    """Around a call that a worker answers."""
    ident = threading.get_ident()
    _calls[ident] = _Call(method)
    try:
        yield
    finally:
        _calls.pop(ident, None)


class Notebook:
    """Looks at this process once for every sign of life."""

    def __init__(self) -> None:
        self._moves = 0

    def look(self) -> Notes:
        now = time.monotonic()
        found = [
            NotedWait(wait.name, wait.target, now - wait.started, wait.deadline_s) for wait in waits.active()
        ]
        frames = sys._current_frames()
        for ident, call in list(_calls.items()):
            frame = frames.get(ident)
            if frame is None:
                continue
            place = _stack_of(frame)
            if place != call.place:
                call.place, call.since = place, now
                self._moves += 1
                continue
            what, target = _describe(frame)
            found.append(NotedWait(f"{call.method}: {what}", target, now - call.since, None))
        return Notes(self._moves + waits.num_ended(), found, drain_reports())


def _stack_of(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    places = []
    while frame is not None:
        places.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(places)


def _describe(innermost: FrameType) -> tuple[str, str]:
    """Where a thread stands, with the line of slime's that led there, and whom it waits for."""
    collective: str | None = None
    frame: FrameType | None = innermost
    led_there, depth = innermost, 0
    while frame is not None and "/slime/runtime/" not in frame.f_code.co_filename:
        name = frame.f_code.co_filename
        if depth < _DEPTH and any(part in name for part in _COLLECTIVES):
            collective = frame.f_code.co_name  # the outermost of them has the name people know
        led_there, depth = frame, depth + 1
        if "/slime/" in name:
            break
        frame = frame.f_back
    where = f"{collective or innermost.f_code.co_name} ({_line(led_there)})"
    return f"stands in {where}", OTHER_RANKS if collective else ""


def _line(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    _, found, rest = name.rpartition("/slime/")
    return f"{'slime/' + rest if found else name}:{frame.f_lineno}"
