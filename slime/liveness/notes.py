"""Notes that a worker sends with every heartbeat: what it waits for, and where its work is stuck.

Collectives are not wrapped one by one: a thread that is seen at the same place inside `torch.distributed` in
two heartbeats in a row waits for the other ranks, wherever torch or Megatron started the collective.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from slime.liveness import waits

_COLLECTIVES = ("/torch/distributed/", "/megatron/core/pipeline_parallel/p2p_communication")
_DEPTH = 12  # innermost frames that are searched for a collective


@dataclass(frozen=True, slots=True)
class NotedWait:
    """A wait of a worker. It has an age and no start time, because clocks of machines differ."""

    what: str
    target: str
    age_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Notes:
    """`moves` grows when a thread is seen at another place, and with each wait that ends."""

    moves: int = 0
    waits: list[NotedWait] = field(default_factory=list)


class _Call:
    """A call in progress in one thread."""

    __slots__ = ("method", "place", "since")

    def __init__(self, method: str):
        self.method, self.since = method, time.monotonic()
        self.place: object = None  # the stack at the last heartbeat


_calls: dict[int, _Call] = {}  # by thread


@contextlib.contextmanager
def working(method: str) -> Iterator[None]:
    """Surround a call that a worker handles."""
    ident = threading.get_ident()
    _calls[ident] = _Call(method)
    try:
        yield
    finally:
        _calls.pop(ident, None)


class Notebook:
    """Takes notes on this process, once for every heartbeat."""

    def __init__(self) -> None:
        self._moves = 0

    def take(self) -> Notes:
        now = time.monotonic()
        found = [NotedWait(wait.name, wait.target, wait.age_s, wait.deadline_s) for wait in waits.active()]
        frames = sys._current_frames()
        for ident, call in list(_calls.items()):
            frame = frames.get(ident)
            if frame is None:
                continue
            place = [(id(each.f_code), each.f_lasti) for each in _stack_of(frame)]
            if place != call.place:
                call.place, call.since = place, now
                self._moves += 1
            else:
                what, target = _describe(frame)
                found.append(NotedWait(f"{call.method}: {what}", target, now - call.since, None))
        return Notes(self._moves + waits.num_ended(), found)


def _stack_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a thread, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(innermost: FrameType) -> tuple[str, str]:
    """Return where a thread is stuck, with the line of slime that led there, and whom it waits for."""
    collective, caller = "", innermost
    for depth, frame in enumerate(_stack_of(innermost)):
        file = frame.f_code.co_filename
        if "/slime/runtime/" in file:
            break
        if depth < _DEPTH and any(part in file for part in _COLLECTIVES):
            collective = frame.f_code.co_name  # the outermost of them has the name people know
        caller = frame
        if "/slime/" in file:
            break
    _, found, rest = caller.f_code.co_filename.rpartition("/slime/")
    line = f"{'slime/' + rest if found else caller.f_code.co_filename}:{caller.f_lineno}"
    name = collective or innermost.f_code.co_name
    return f"stands in {name} ({line})", "the other ranks" if collective else ""
