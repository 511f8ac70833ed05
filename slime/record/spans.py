"""What of a step took how long: spans in lanes, from the driver, the samples and the trainer ranks.

Lanes are `loop` (what the driver does), `engine-N` (answers, by the engine that wrote them; `engines` where a
router does not say which), `episodes` (a generate function of the user's), `reward`, `trainer-N`, `push` (the
parts of a weight push) and `waits: WHO`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slime.record.rows import insert_rows
from slime.utils import waits
from slime.utils.types import Sample

LOOP, ENGINES, EPISODES, REWARD, TRAINER = "loop", "engines", "episodes", "reward", "trainer-{rank}"
PUSH, WAITS = "push", "waits: {owner}"
_OF_THE_LOOP = ("run", "start of the run")  # owners of what the lane of the loop shows
_MAX_WAITS = 200  # of one process in a step; the longest
_encode = json.JSONEncoder(default=str).encode  # `json.dumps` makes one for each call
_Stretch = tuple[float, float, int | None, bool, dict[str, Any]]  # start, end, sample, of its group, more
_ABOUT_S = 0.02  # that samples begin and end apart and are drawn as one
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
    """When engines and rewards worked on each sample, read from the traces of those that have one.

    Samples of a group that begin and end at about the same time are one span: "group 7", with their number.
    """
    found: dict[tuple[str, int | None], list[_Stretch]] = {}
    for sample in samples:
        opened: dict[str, float] = {}
        trace = sample.__dict__.get("trace")
        for event in trace.get("events", ()) if trace else ():
            lane = _LANE_OF_TRACE.get(event["name"])
            if lane is None:
                continue
            kind = event.get("type")
            if kind == "span_start":
                opened[event["span_id"]] = event["ts"]
            elif kind == "span_end" and (start := opened.get(event["span_id"])) is not None:
                attrs = event.get("attrs") or {}
                at = (attrs.get("engine") or lane, sample.group_index)
                of_group = event["name"].startswith("group")
                found.setdefault(at, []).append((start, event["ts"], sample.index, of_group, attrs))
    spans: list[Span] = []
    for (lane, group), stretches in found.items():
        stretches.sort(key=lambda stretch: stretch[1])
        for together in _at_once(stretches):
            spans.append(_span_of(rollout_id, lane, group, together))
    return spans


def _at_once(stretches: list[_Stretch]) -> Iterator[list[_Stretch]]:
    """Those that belong together, of a list in the order of their ends."""
    first = stretches[0]
    together: list[_Stretch] = []
    for stretch in stretches:
        if stretch[1] - first[1] > _ABOUT_S or abs(stretch[0] - first[0]) > _ABOUT_S:
            yield together
            first, together = stretch, []
        together.append(stretch)
    yield together


def _span_of(rollout_id: int, lane: str, group: int | None, together: list[_Stretch]) -> Span:
    start, end, index, of_group, attrs = together[0]
    about: dict[str, Any] = {"group": group, **attrs}
    about.pop("engine", None)
    if len(together) == 1 and not of_group:
        return Span(rollout_id, lane, f"sample {index}", start, end, {"sample": index, **about})
    if not of_group:
        about = {"group": group, "samples": len(together)}
        start, end = min(stretch[0] for stretch in together), together[-1][1]
    return Span(rollout_id, lane, f"group {group}", start, end, about)


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
    insert_rows(
        connection,
        "spans",
        ("rollout_id", "lane", "name", "start", "end", "about"),
        [
            (s.rollout_id, s.lane, s.name, s.start, s.end, _encode(s.about) if s.about else None)
            for s in spans
        ],
    )


def forget_spans(connection: sqlite3.Connection, from_rollout: int) -> None:
    """A run that goes on from a checkpoint makes these steps anew."""
    connection.execute("DELETE FROM spans WHERE rollout_id >= ?", (from_rollout,))
