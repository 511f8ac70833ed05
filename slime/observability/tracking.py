"""Writes the metrics of a run to metrics.jsonl, one JSON object per line; trackers read that file.

A line holds every metric of one report, its step axis and the wall time:
    {"time": 1754820000.1, "run": "3f9c01aa", "start": 1, "step_key": "rollout/step", "step": 3,
     "rollout/step": 3, "rollout/raw_reward": 0.5}
`run` is the id of the run that the folder belongs to (run.json), `start` counts its starts. A resumed run
appends; where a step occurs twice, the later line counts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
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
    the driver of the run already did.
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
        self._fd: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):  # a power failure may leave an incomplete last line
            os.ftruncate(self._fd, content.rfind(b"\n") + 1)
        options = tracker_options(args)
        self._feeds = [load_function(FEED)(name, self.path.parent.absolute(), options) for name in names]

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int | None = None) -> None:
        """Record metrics at `step` on the axis `step_key`; default: the metrics' own value of that key."""
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
            self._write(self._fd, (json.dumps(line, allow_nan=False) + "\n").encode())
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

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finish()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the complete lines of a metrics file, or of the one in a run folder."""
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    return [row for _, row in rows_after(path, 0)]


def rows_after(path: Path, offset: int) -> Iterator[tuple[int, Row]]:
    """Yield the rows after `offset`, each with the offset of its end.

    An incomplete last line is left for the next call; lines that a full disk damaged are skipped.
    """
    with path.open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield offset, row


def plain_value(key: str, value: Any) -> Any:
    """Convert a metric to a JSON value: 0-d tensors and arrays become numbers, NaN and infinity become text.

    JSON has neither NaN nor infinity; `float()` reads the text back.
    """
    if hasattr(value, "item") and hasattr(value, "dtype"):
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"metric {key!r} is a {type(value).__name__} of several elements, not a number"
            ) from error
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain_value(f"{key}/{k}", v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(key, item) for item in value]
    raise ValueError(f"metric {key!r} is a {type(value).__name__}: log numbers or text")
