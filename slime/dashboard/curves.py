"""The curves of a run: reads metrics.jsonl incrementally and reduces curves to the width of the screen."""

from __future__ import annotations

import contextlib
import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slime.observability.tracking import Row, rows_after
from slime.utils.files.run_file import METRICS_FILE

_OF_THE_LINE = {"time", "run", "start", "step_key", "step"}
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


class Curves:
    """All curves of one run. `read` adds new lines; safe to call from any thread."""

    def __init__(self, folder: Path, file: str = METRICS_FILE):
        self._file, self._offset, self._lock = folder / file, 0, threading.Lock()
        self._identity: tuple[int, int] | None = None  # of the file: another run may have taken its place
        self._by_name: dict[str, Curve] = {}
        self.last_time: float | None = None
        self._is_read = False  # once: from then on a read takes only what is new

    def read(self) -> None:
        with self._lock, contextlib.suppress(FileNotFoundError):
            found = self._file.stat()
            if self._identity != (found.st_dev, found.st_ino) or found.st_size < self._offset:
                self._identity, self._offset, self._by_name = (found.st_dev, found.st_ino), 0, {}
                self.last_time = None
            for offset, row in rows_after(self._file, self._offset):
                self._offset = offset
                self._add(row)
            self._is_read = True

    def glance(self, steps: str, wanted: Callable[[str], bool]) -> tuple[int | None, dict[str, float | None]]:
        """Return the last step of a metric, and the last values of the wanted metrics and of the time.

        Until `read` has read the whole file, this reads only its end, so that a list of many runs is fast.
        """
        values: dict[str, float | None] = {}
        if self._is_read:
            self.read()
            known = [summary for name in self.names() if wanted(name) and (summary := self.summary(name))]
            values = {summary["name"]: summary["last"] for summary in known}
            done = self.summary(steps)
            return done["last_step"] if done else None, {**values, "time": self.last_time}
        step = None
        with contextlib.suppress(OSError):
            for _, row in rows_after(self._file, max(0, self._file.stat().st_size - _GLANCE_BYTES)):
                found = {name: _number(value) for name, value in row.items() if wanted(name)}
                values |= {name: value and _finite(value) for name, value in found.items()}
                values["time"] = max(row.get("time", 0.0), values.get("time") or 0.0)
                step = row["step"] if steps in row else step
        return step, values

    def _add(self, row: Row) -> None:
        """Add a row: a resumed run logs steps again, and the later line counts."""
        axis, time = str(row.get("step_key")), float(row.get("time", 0.0))
        self.last_time = max(time, self.last_time or 0.0)
        for name, logged in row.items():
            value = _number(logged)
            if value is not None and name not in _OF_THE_LINE and name != axis:
                self._by_name.setdefault(name, Curve(axis)).add(int(row["step"]), value, time)

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
                "first": _finite(curve.values[0]),
                "last": _finite(curve.values[-1]),
                "last_step": curve.steps[-1],
            }

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
        inside = slice(max(begin - 1, 0), end + 1)  # one point beyond each edge, so that lines reach it
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
    smoothed, total, count = values.copy(), 0.0, 0.0
    for place, value in enumerate(values.tolist()):
        total, count = weight * total, weight * count
        if math.isfinite(value):
            total, count = total + value, count + 1.0
        if count:
            smoothed[place] = total / count
    return smoothed


def plain(values: np.ndarray) -> list[float | None]:
    """Convert values for JSON, which has no NaN, with seven digits each."""
    return [_finite(float(f"{value:.7g}")) for value in values.tolist()]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
    if isinstance(value, (int, float)):
        return None if isinstance(value, bool) else float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None
