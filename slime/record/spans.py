"""What of a step took how long: spans in lanes, from the driver, the samples and the trainer ranks.

Lanes are `loop` (what the driver does), `engine-N` (answers, by the engine that wrote them; `engines` where a
router does not say which), `episodes` (a generate function of the user's), `reward`, `trainer-N`, `push` (the
parts of a weight push) and `waits: WHO`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slime.utils import waits
from slime.utils.types import Sample

LOOP, ENGINES, EPISODES, REWARD, TRAINER = "loop", "engines", "episodes", "reward", "trainer-{rank}"
PUSH, WAITS = "push", "waits: {owner}"
_OF_THE_LOOP = ("run", "start of the run")  # owners of what the lane of the loop shows
_MAX_WAITS = 200  # of one process in a step; the longest
_encode = json.JSONEncoder(default=str).encode  # `json.dumps` makes one for each call
_LANE_OF_TRACE = {
    "generate": ENGINES,
    "generate_function": EPISODES,
    "reward_model": REWARD,
    "group_reward_model": REWARD,
}


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in one lane.

    Example: Span(12, "loop", "generating", 1754820000.1, 1754820004.3, {}). Times are seconds since 1970.
    """

    rollout_id: int
    lane: str
    name: str
    start: float
    end: float
    about: dict[str, Any] = field(default_factory=dict)


def spans_of_samples(rollout_id: int, samples: Iterable[Sample]) -> list[Span]:
    """When engines and rewards worked on each sample, read from the traces of those that have one."""
    found: dict[str, Span] = {}  # by id: one call for a whole group is on the trace of each of its samples
    for sample in samples:
        opened: dict[str, dict[str, Any]] = {}
        for event in (sample.__dict__.get("trace") or {}).get("events", ()):
            key = event.get("span_id")
            if event.get("type") == "span_start":
                opened[key] = event
            elif event.get("type") == "span_end" and key in opened and event["name"] in _LANE_OF_TRACE:
                lane, start = _LANE_OF_TRACE[event["name"]], opened[key]["ts"]
                about = {"sample": sample.index, "group": sample.group_index, **(event.get("attrs") or {})}
                lane = about.pop("engine", None) or lane
                of_group = event["name"].startswith("group")
                name = f"group {sample.group_index}" if of_group else f"sample {sample.index}"
                found[f"{lane} {name} {start}"] = Span(rollout_id, lane, name, start, event["ts"], about)
    return list(found.values())


def spans_of_waits(rollout_id: int) -> list[Span]:
    """What this process waited for since the last call; not what has a lane of its own."""
    kept = [
        (wait, end)
        for wait, end in waits.take_ended()
        if wait.owner not in _OF_THE_LOOP and waits.OF_ONE_REQUEST not in wait.name
    ]
    kept = sorted(kept, key=lambda entry: entry[0].started - entry[1])[:_MAX_WAITS]
    now, clock = time.time(), time.monotonic()
    return [
        Span(
            rollout_id,
            WAITS.format(owner=wait.owner),
            wait.name.replace(wait.target, "") if "://" in wait.target else wait.name,
            now - (clock - wait.started),
            end,
            {"for": waits.known_as(wait.target)} if wait.target else {},
        )
        for wait, end in kept
    ]


def write_spans(connection: sqlite3.Connection, spans: Iterable[Span]) -> None:
    connection.executemany(
        "INSERT INTO spans (rollout_id, lane, name, start, end, about) VALUES (?, ?, ?, ?, ?, ?)",
        [
            (
                s.rollout_id,
                s.lane,
                s.name,
                s.start,
                s.end,
                _encode(s.about) if s.about else None,
            )
            for s in spans
        ],
    )


def forget_spans(connection: sqlite3.Connection, from_rollout: int) -> None:
    """A run that goes on from a checkpoint makes these steps anew."""
    connection.execute("DELETE FROM spans WHERE rollout_id >= ?", (from_rollout,))
