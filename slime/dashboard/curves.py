"""The curves of a run: metrics.jsonl read once, then only what is new; thinned out to what a screen shows."""

from __future__ import annotations

import json
import os
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils.run_file import METRICS_FILE

_OF_THE_LINE = {"time", "run", "start", "step_key", "step"}
_CHUNK_BYTES = 4 << 20


@dataclass(slots=True)
class Curve:
    """One metric: its values by step, in the order of steps. `axis`: what a step counts."""

    axis: str
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float, time: float) -> None:
        """Where a step occurs twice, the later line counts."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            self.times.append(time)
            return
        at = bisect_left(self.steps, step)
        if self.steps[at] == step:
            self.values[at], self.times[at] = value, time
        else:
            self.steps.insert(at, step)
            self.values.insert(at, value)
            self.times.insert(at, time)


class Curves:
    """All curves of one run. `read` takes what the file has got since; safe to call from any thread."""

    def __init__(self, folder: Path):
        self._file, self._offset, self._lock = folder / METRICS_FILE, 0, threading.Lock()
        self._identity: tuple[int, int] | None = None  # of the file: another run may have taken its place
        self._by_name: dict[str, Curve] = {}
        self.last_time: float | None = None

    def read(self) -> None:
        with self._lock:
            try:
                with self._file.open("rb") as file:
                    self._restart_if_replaced(file.fileno())
                    file.seek(self._offset)
                    while chunk := self._whole_lines(file.read(_CHUNK_BYTES)):
                        self._offset += len(chunk)
                        for line in chunk.splitlines():
                            self._take(line)
                        file.seek(self._offset)
            except FileNotFoundError:
                return

    def _restart_if_replaced(self, fd: int) -> None:
        found = os.fstat(fd)
        if self._identity != (found.st_dev, found.st_ino) or found.st_size < self._offset:
            self._identity, self._offset, self._by_name = (found.st_dev, found.st_ino), 0, {}
            self.last_time = None

    @staticmethod
    def _whole_lines(chunk: bytes) -> bytes:
        return chunk[: chunk.rfind(b"\n") + 1]

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            axis, step, time = row["step_key"], int(row["step"]), float(row.get("time", 0.0))
        except (ValueError, KeyError, TypeError):  # what a disk that failed left of it
            return
        self.last_time = max(time, self.last_time or 0.0)
        for name, value in row.items():
            if name in _OF_THE_LINE or name == axis:
                continue
            number = _number(value)
            if number is not None:
                curve = self._by_name.get(name)
                if curve is None:
                    curve = self._by_name[name] = Curve(str(axis))
                curve.add(step, number, time)

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._by_name)

    def summary(self, name: str) -> dict[str, Any] | None:
        """Its axis, how many values, the first and the last; None: there is none of that name."""
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

    def total(self, name: str) -> float:
        """The sum of all values; 0 for a metric that was never logged."""
        with self._lock:
            curve = self._by_name.get(name)
            return float(np.nansum(np.frombuffer(curve.values))) if curve is not None else 0.0

    def series(
        self,
        name: str,
        *,
        width: int,
        smooth: float = 0.0,
        low: float | None = None,
        high: float | None = None,
    ) -> dict[str, Any] | None:
        """At most `width` points between the steps `low` and `high`: mean, lowest and highest of each.

        `smooth` in [0, 1): the weight of the past in a moving average over all steps.
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
            "x": steps[edges[:-1]].tolist(),
            "time": times[edges[:-1]].tolist(),
            "y": plain(_means(values, edges)),
        }
        if len(edges) - 1 < len(steps):
            found["low"] = plain(np.fmin.reduceat(values, edges[:-1]))
            found["high"] = plain(np.fmax.reduceat(values, edges[:-1]))
        if smoothed is not None:
            found["smooth"] = plain(_means(smoothed[inside], edges))
        return found


def moving_average(values: np.ndarray, weight: float) -> np.ndarray:
    """Each value is `weight` of the past and the rest of itself; its short past is made up for."""
    out, mean, norm = np.empty_like(values), 0.0, 0.0
    for number, value in enumerate(values.tolist()):
        if value == value and abs(value) != float("inf"):
            mean = weight * mean + (1 - weight) * value
            norm = weight * norm + (1 - weight)
        out[number] = mean / norm if norm else value
    return out


def plain(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """For JSON, which knows no NaN."""
    return [finite(value) for value in np.asarray(values, dtype=float).tolist()]


def finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _edges(count: int, width: int) -> np.ndarray:
    """Where each of at most `width` equal shares begins, and the end of the last."""
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
