"""Hands on what a run has logged so far (`metrics.jsonl`), while it runs and after it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from slime.observability.metric_lines import Row, whole_rows

POLL_S = 0.4


class MetricsReader:
    """The rows of a growing file, each once; a line still being written is left for the next time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_records(self) -> list[Row]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return whole_rows(complete.splitlines(keepends=True))


class Repeated:
    """Calls `act` again and again while a `with` block runs, and once more when the block has ended."""

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
