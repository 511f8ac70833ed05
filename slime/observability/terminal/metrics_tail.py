"""Reads the metrics of a run as they are logged, and repeats a function while a block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from slime.observability.tracking import Row, rows_after

POLL_S = 0.4


class MetricsReader:
    """Returns each row of a growing file once; an incomplete last line is left for the next call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_records(self) -> list[Row]:
        found = list(rows_after(self.path, self._offset)) if self.path.exists() else []
        self._offset = found[-1][0] if found else self._offset
        return [row for _, row in found]


class Repeated:
    """Calls `act` repeatedly while a `with` block runs, and once more when it has ended."""

    def __init__(self, act: Callable[[], None], name: str) -> None:
        self._act, self._ended = act, threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=name, daemon=True)

    def __enter__(self) -> Repeated:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()
        self._act()

    def _repeat(self) -> None:
        while not self._ended.wait(POLL_S):
            self._act()
