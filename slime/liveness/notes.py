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
from traceback import walk_stack
from types import FrameType

from slime.liveness import usage, waits

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
    usage: dict[str, usage.Usage] = field(
        default_factory=dict
    )  # by process: the worker, and those it follows


@dataclass(eq=False, slots=True)
class _Call:
    """A call in progress in one thread. `place`: its stack at the last heartbeat, which is so `since`."""

    method: str
    since: float = 0.0
    place: object = None


LISTENING = "news"  # the method that waits until a worker has something to report, which is no work
_calls: dict[int, _Call] = {}  # by thread
_moves = 0


@contextlib.contextmanager
def working(method: str) -> Iterator[None]:
    """Surround a call that a worker handles."""
    if method == LISTENING:
        yield
        return
    ident = threading.get_ident()
    _calls[ident] = _Call(method)
    try:
        yield
    finally:
        _calls.pop(ident, None)


def take_notes() -> Notes:
    """Take notes on this process, once for every heartbeat."""
    global _moves
    now, frames = time.monotonic(), sys._current_frames()
    found = [NotedWait(wait.name, wait.target, wait.age_s, wait.deadline_s) for wait in waits.active()]
    for ident, call in list(_calls.items()):
        frame = frames.get(ident)
        if frame is None:
            continue
        place = [(id(each.f_code), each.f_lasti) for each, _ in walk_stack(frame)]
        if place != call.place:
            call.place, call.since = place, now
            _moves += 1
        else:
            what, target = _describe(frame)
            found.append(NotedWait(f"{call.method}: {what}", target, now - call.since, None))
    return Notes(_moves + waits.num_ended(), found, usage.readings())


def _describe(innermost: FrameType) -> tuple[str, str]:
    """Return where a thread is stuck, with the line of slime that led there, and whom it waits for."""
    collective, caller = "", innermost
    for depth, (frame, _) in enumerate(walk_stack(innermost)):
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
