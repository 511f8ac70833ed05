"""Metrics of a run: one JSON object per line in metrics.jsonl, which trackers read.

A line holds every metric of one report, its step axis and the wall time:
    {"time": 1754820000.1, "run": "3f9c01aa", "start": 1, "step_key": "rollout/step", "step": 3,
     "rollout/step": 3, "rollout/raw_reward": 0.5}
`run` is the id of the run that the folder belongs to (run.json), `start` counts its starts. A resumed run
appends; where a step occurs twice, the later line is the one that counts.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.catalog.trackers import FEED, TRACKERS, chosen_trackers, missing_package, tracker_options
from slime.utils.errors import RunStopped
from slime.utils.files.run_file import METRICS_FILE, read_run
from slime.utils.misc import is_installed, load_function

Row = dict[str, Any]


class Tracker:
    """Writes metrics from any thread; each report is on disk when `log` returns.

    Trackers such as W&B read that file in processes of their own. `feeds` False: do not start them, because
    the driver of the run has.
    """

    def __init__(self, args: object, run_dir: str | Path, *, feeds: bool = True):
        names = chosen_trackers(args) if feeds else []
        for name in names:  # before anything is written
            if not is_installed(TRACKERS[name].package):
                raise ValueError(missing_package(name))
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        record = read_run(self.path.parent)
        self._origin = {"run": record.id, "start": record.num_starts} if record is not None else {}
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        _cut_torn_line(self._fd)
        options = tracker_options(args)
        self._feeds = [load_function(FEED)(name, self.path.parent.absolute(), options) for name in names]

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int | None = None) -> None:
        """Record metrics at a step of the axis `step_key`; without `step` they hold it under that key."""
        if step is None:
            if step_key not in metrics:
                raise ValueError(f"no step given and the metrics have no {step_key!r}")
            step = int(metrics[step_key])
        values = {key: plain_value(key, value) for key, value in metrics.items()}
        values[step_key] = step
        line = {"time": time.time(), **self._origin, "step_key": step_key, "step": step, **values}
        with self._lock:
            if self._fd is None:
                raise ValueError("this tracker is finished")
            # One write per line: lines of several processes never mix, and a crash cannot split one.
            self._write(self._fd, (json.dumps(_finite(line), allow_nan=False) + "\n").encode())
            for feed in self._feeds:
                feed.check()

    def _write(self, fd: int, line: bytes) -> None:
        try:
            written = os.write(fd, line)
        except OSError as error:
            raise RunStopped(
                f"--run-dir {self.path.parent}: metrics cannot be written: {error.strerror}"
            ) from error
        if written < len(line):
            raise RunStopped(f"--run-dir {self.path.parent}: metrics cannot be written: the disk is full")

    def finish(self) -> None:
        """Flush and close everything; calling it again does nothing."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
                for feed in self._feeds:
                    feed.finish()

    close = finish

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finish()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the complete lines of a metrics file, or of the one in a run folder."""
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    with path.open("rb") as lines:
        return whole_rows(lines)


def whole_rows(lines: Iterable[bytes]) -> list[Row]:
    """Parse complete lines; skip one that is being written, and what a full disk left damaged."""
    parsed = (_parsed(line) for line in lines if line.endswith(b"\n"))
    return [row for row in parsed if isinstance(row, dict)]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def plain_value(key: str, value: Any) -> Any:
    """Convert a metric to a JSON value; 0-d tensors and arrays become numbers."""
    if hasattr(value, "item") and hasattr(value, "dtype"):
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"metric {key!r} is a {type(value).__name__} of several elements, not a number"
            ) from error
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain_value(f"{key}/{k}", v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(key, item) for item in value]
    raise ValueError(f"metric {key!r} is a {type(value).__name__}: log numbers or text")


def _finite(value: Any) -> Any:
    """Write NaN and infinity as text, because JSON has neither; `float()` reads it back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value


def _cut_torn_line(fd: int) -> None:
    """Remove an incomplete last line, which a power failure may leave."""
    size = os.fstat(fd).st_size
    keep = size
    while keep > 0:
        start = max(0, keep - 65536)
        newline = os.pread(fd, keep - start, start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep < size:
        os.ftruncate(fd, keep)
