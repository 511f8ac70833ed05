"""Reads the spans of a run for the dashboard's timeline and for trace files."""

import heapq
import json
import re
import sqlite3
from typing import Any

_MAX_SPANS = 6000
_COLUMNS = "rollout_id, lane, name, start, end, about"
_NAMES = ("step", "lane", "name", "start", "end", "about")


def steps_with_spans(connection: sqlite3.Connection) -> dict[str, Any]:
    # Two queries, because each is one lookup in the index; both in one SELECT would read all of it.
    [(first, last)] = connection.execute(
        "SELECT (SELECT min(rollout_id) FROM spans), (SELECT max(rollout_id) FROM spans)"
    )
    return {"first": first, "last": last}


def spans_of(connection: sqlite3.Connection, first: int, last: int) -> dict[str, Any]:
    """Return the lanes of the steps `first` to `last`; each span has the row in which it is drawn.

    If there are too many spans, the longest are kept; `left_out` is the number of the others.
    """
    [(total,)] = connection.execute(
        "SELECT count(*) FROM spans WHERE rollout_id BETWEEN ? AND ?", (first, last)
    )
    order = "start" if total <= _MAX_SPANS else "end - start DESC"
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM spans WHERE rollout_id BETWEEN ? AND ? ORDER BY {order} LIMIT ?",
        (first, last, _MAX_SPANS),
    ).fetchall()
    spans = sorted((as_span(row) for row in rows), key=lambda span: span["start"])
    lanes: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        lanes.setdefault(span["lane"], []).append(span)
    return {
        "lanes": [
            {"name": name, **packed(lanes[name]), "busy": covered(lanes[name])}
            for name in sorted(lanes, key=_place)
        ],
        "left_out": max(0, total - len(rows)),
        "start": min((span["start"] for span in spans), default=None),
        "end": max((span["end"] for span in spans), default=None),
    }


def packed(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """Assign each span, in the order of their starts, to the first row that is free at that time."""
    ends: list[tuple[float, int]] = []  # (end of the last span, row)
    free: list[int] = []
    num_rows = 0
    for span in spans:
        while ends and ends[0][0] <= span["start"] + 1e-6:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, num_rows = num_rows, num_rows + 1
        span["row"] = row
        heapq.heappush(ends, (span["end"], row))
    return {"rows": num_rows, "spans": spans}


def covered(spans: list[dict[str, Any]]) -> float:
    """Return the seconds covered by at least one of the spans, which are sorted by start."""
    seconds, until = 0.0, float("-inf")
    for span in spans:
        seconds += max(0.0, span["end"] - max(span["start"], until))
        until = max(until, span["end"])
    return seconds


def as_span(row: tuple[Any, ...]) -> dict[str, Any]:
    span = dict(zip(_NAMES, row, strict=True))
    span["about"] = json.loads(span["about"]) if span["about"] else {}
    return span


def _place(lane: str) -> tuple[int, list[tuple[int, str]]]:
    """Sort lanes along the path of a sample; engine-10 follows engine-9."""
    order = ("start", "loop", "episodes", "engine", "reward", "trainer", "push", "waits")
    kinds = (number for number, name in enumerate(order) if lane.startswith(name))
    parts = [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", lane)]
    return next(kinds, order.index("reward")), parts


def all_spans(
    connection: sqlite3.Connection, first: int | None = None, last: int | None = None
) -> list[dict[str, Any]]:
    """Return every span of the steps `first` to `last`; None: of all steps."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM spans WHERE rollout_id BETWEEN ? AND ? ORDER BY start",
        (-1 if first is None else first, 1 << 60 if last is None else last),
    )
    return [as_span(row) for row in rows]
