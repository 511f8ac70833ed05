"""The curves of a run: reads metrics.jsonl incrementally and reduces curves to the width of the screen."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import threading
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slime.utils.files.run_file import METRICS_FILE

_OF_THE_LINE = {"time", "run", "start", "step_key", "step"}
_NUMBERS = {float, int}
_CHUNK_BYTES = 4 << 20
_GLANCE_BYTES = 64 << 10


@dataclass(slots=True)
class Curve:
    """One metric: its values by step, sorted. `axis`: the metric that counts steps."""

    axis: str
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float, time: float) -> None:
        """Add a value; a step that occurs again is overwritten."""
        at = bisect_left(self.steps, step)
        if at < len(self.steps) and self.steps[at] == step:
            self.values[at], self.times[at] = value, time
        else:
            self.steps.insert(at, step)
            self.values.insert(at, value)
            self.times.insert(at, time)


class _Row(NamedTuple):
    """A line of metrics.jsonl."""

    axis: str
    step: int
    time: float
    values: dict[str, Any]


def _parsed(line: bytes) -> _Row | None:
    try:
        row = json.loads(line)
        return _Row(str(row["step_key"]), int(row["step"]), float(row.get("time", 0.0)), row)
    except (ValueError, KeyError, TypeError, AttributeError):  # what a disk that failed left of it
        return None


class Curves:
    """All curves of one run. `read` adds new lines; safe to call from any thread."""

    def __init__(self, folder: Path):
        self._file, self._offset, self._lock = folder / METRICS_FILE, 0, threading.Lock()
        self._identity: tuple[int, int] | None = None  # of the file: another run may have taken its place
        self._by_name: dict[str, Curve] = {}
        self.last_time: float | None = None
        self.is_read = False  # once, so that only what is new has to be

    def read(self) -> None:
        with self._lock:
            try:
                with self._file.open("rb") as file:
                    self._restart_if_replaced(file.fileno())
                    file.seek(self._offset)
                    while chunk := self._whole_lines(file.read(_CHUNK_BYTES)):
                        self._offset += len(chunk)
                        self._take(chunk.splitlines())
                        file.seek(self._offset)
                self.is_read = True
            except FileNotFoundError:
                return

    def glance(self, name: str) -> tuple[int | None, float | None]:
        """Return the last step of a metric and the time of the last line, from the end of the file."""
        if self.is_read:
            self.read()
            found = self.summary(name)
            return found["last_step"] if found else None, self.last_time
        step, last_time = None, None
        with contextlib.suppress(OSError), self._file.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _GLANCE_BYTES))
            for row in filter(None, map(_parsed, file.read().splitlines())):
                last_time = max(row.time, last_time or 0.0)
                step = row.step if name in row.values else step
        return step, last_time

    def _restart_if_replaced(self, fd: int) -> None:
        found = os.fstat(fd)
        if self._identity != (found.st_dev, found.st_ino) or found.st_size < self._offset:
            self._identity, self._offset, self._by_name = (found.st_dev, found.st_ino), 0, {}
            self.last_time = None

    @staticmethod
    def _whole_lines(chunk: bytes) -> bytes:
        return chunk[: chunk.rfind(b"\n") + 1]

    def _take(self, lines: list[bytes]) -> None:
        """Add rows: those with the same metrics column by column, the others value by value."""
        rows = list(filter(None, map(_parsed, lines)))
        if not rows:
            return
        self.last_time = max(max(row.time for row in rows), self.last_time or 0.0)
        shapes: dict[tuple[str, ...], list[_Row]] = {}
        for row in rows:
            shapes.setdefault(tuple(row.values), []).append(row)
        occurs = Counter(name for names in shapes for name in names)
        slow: set[str] = set()
        for names, alike in shapes.items():
            steps, times = array("q", [row.step for row in alike]), array("d", [row.time for row in alike])
            ascending = all(map(operator.lt, steps, steps[1:]))
            for name, column in zip(
                names, zip(*(row.values.values() for row in alike), strict=True), strict=True
            ):
                if name in _OF_THE_LINE or name == alike[0].axis:
                    continue
                curve = self._by_name.get(name)
                follows = curve is None or not curve.steps or steps[0] > curve.steps[-1]
                if not (ascending and follows and occurs[name] == 1 and set(map(type, column)) <= _NUMBERS):
                    slow.add(name)
                    continue
                if curve is None:
                    curve = self._by_name[name] = Curve(alike[0].axis)
                curve.steps.extend(steps)
                curve.values.extend(array("d", column))
                curve.times.extend(times)
        if slow:
            for row in rows:
                self._take_one_by_one(row, slow)

    def _take_one_by_one(self, row: _Row, names: set[str]) -> None:
        """Add rows in file order: a resumed run logs steps again, and the later line counts."""
        for name in names & row.values.keys():
            value = _number(row.values[name])
            if value is not None:
                self._by_name.setdefault(name, Curve(row.axis)).add(row.step, value, row.time)

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._by_name)

    def summary(self, name: str) -> dict[str, Any] | None:
        """Return axis, number of values, first and last step of a metric; None if it does not exist."""
        with self._lock:
            curve = self._by_name.get(name)
            if curve is None:
                return None
            return {
                "name": name,
                "axis": curve.axis,
                "count": len(curve.steps),
                "first": finite(curve.values[0]),
                "last": finite(curve.values[-1]),
                "last_step": curve.steps[-1],
            }

    def last(self, name: str) -> float | None:
        found = self.summary(name)
        return found["last"] if found else None

    def newest(self, name: str, count: int) -> list[float]:
        """Return the last finite values."""
        with self._lock:
            curve = self._by_name.get(name)
            return [value for value in curve.values[-count:] if math.isfinite(value)] if curve else []

    def total(self, name: str) -> float:
        """Return the sum of all values; 0 for a metric that was never logged."""
        with self._lock:
            curve = self._by_name.get(name)
            return float(np.nansum(np.frombuffer(curve.values))) if curve is not None else 0.0

    def series(
        self,
        name: str,
        *,
        width: int,
        smooth: float = 0.0,
        by_time: bool = False,
        low: float | None = None,
        high: float | None = None,
    ) -> dict[str, Any] | None:
        """Return at most `width` points between the steps `low` and `high`, each with mean and range.

        `smooth` in [0, 1): the weight of the past in a moving average over all steps. `by_time`: the points
        are at seconds since 1970, not at steps.
        """
        with self._lock:
            curve = self._by_name.get(name)
            if curve is None:
                return None
            steps = np.frombuffer(curve.steps, np.int64).copy()
            values = np.frombuffer(curve.values).copy()
            times = np.frombuffer(curve.times).copy()
            axis = curve.axis
        smoothed = moving_average(values, smooth) if smooth else None
        begin = 0 if low is None else int(np.searchsorted(steps, low, "left"))
        end = len(steps) if high is None else int(np.searchsorted(steps, high, "right"))
        inside = slice(max(begin - 1, 0), end + 1)  # one beyond each edge, so that lines go on to it
        steps, values, times = steps[inside], values[inside], times[inside]
        edges = _edges(len(steps), width)
        found: dict[str, Any] = {
            "name": name,
            "axis": axis,
            "count": len(steps),
            "x": (times if by_time else steps)[edges[:-1]].tolist(),
            "y": plain(_means(values, edges)),
        }
        if len(edges) - 1 < len(steps):
            found["low"] = plain(np.fmin.reduceat(values, edges[:-1]))
            found["high"] = plain(np.fmax.reduceat(values, edges[:-1]))
        if smoothed is not None:
            found["smooth"] = plain(_means(smoothed[inside], edges))
        return found


def moving_average(values: np.ndarray, weight: float) -> np.ndarray:
    """Smooth values exponentially with bias correction; `weight` is the share of the past."""
    known = np.isfinite(values)
    sums = _decaying_sums(np.where(known, values, 0.0), weight)
    counts = _decaying_sums(known.astype(float), weight)
    return np.divide(sums, counts, out=values.copy(), where=counts > 0)


def _decaying_sums(values: np.ndarray, weight: float) -> np.ndarray:
    """Compute s[t] = weight * s[t-1] + values[t] in chunks, so that powers of the weight do not underflow."""
    if weight <= 1e-6:
        return values.copy()
    stretch = max(8, min(4096, int(-250.0 / np.log(weight))))
    out, before = np.empty_like(values), 0.0
    for start in range(0, len(values), stretch):
        part = values[start : start + stretch]
        powers = weight ** np.arange(len(part), dtype=float)
        out[start : start + stretch] = powers * (weight * before + np.cumsum(part / powers))
        before = out[start + len(part) - 1]
    return out


def plain(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Convert a value for JSON, which has no NaN."""
    array = np.asarray(values, dtype=float)
    known = np.isfinite(array) & (array != 0)
    digits = np.zeros(len(array))
    digits[known] = 6 - np.floor(np.log10(np.abs(array[known])))
    # Divided or multiplied by a power of ten that is exact, so that seven digits are what is written.
    scale = 10.0 ** np.clip(np.abs(digits), 0, 22)
    with np.errstate(all="ignore"):
        rounded = np.where(digits >= 0, np.round(array * scale) / scale, np.round(array / scale) * scale)
    rounded = np.where(np.abs(digits) <= 22, rounded, array)
    return [value if math.isfinite(value) else None for value in rounded.tolist()]


def finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _edges(count: int, width: int) -> np.ndarray:
    """Return the starts of at most `width` equal parts, and the end of the last."""
    shares = min(count, max(width, 2))
    return (np.arange(shares + 1) * count) // max(shares, 1) if count else np.zeros(1, dtype=int)


def _means(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    if len(edges) < 2:
        return values[:0]
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), edges[:-1])
    counts = np.add.reduceat(known.astype(float), edges[:-1])
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None
