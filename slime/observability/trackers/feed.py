"""Starts the process of a tracker for a run, and warns once if it fails."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.catalog.trackers import TRACKERS
from slime.observability.trackers.follower import read_progress
from slime.utils.files.run_file import METRICS_FILE
from slime.utils.machine import children
from slime.utils.machine.own_command import as_typed

logger = logging.getLogger(__name__)

_CHECK_S = 5.0  # between two checks of its process
_END_S = 60.0  # how long the end of a run waits


class Feed:
    """One tracker of an active run."""

    def __init__(self, name: str, folder: Path, options: Mapping[str, Any]):
        self.name, self._folder = name, folder
        self.log_path = folder / "logs" / f"tracker-{name}.log"
        command = [sys.executable, "-P", "-m", "slime.observability.trackers.follower", name, str(folder)]
        with children.open_log(self.log_path, f"tracker {name}") as log:
            env = {**os.environ, **children.import_environment()}
            self._process = children.start(command, stdin=children.PIPE, output=log, env=env)
        self._warned = False
        self._checked = time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended; the first check reports that
            given = {"service": TRACKERS[name].service, "options": dict(options)}
            self._process.stdin.write(json.dumps(given, default=str).encode() + b"\n")
            self._process.stdin.flush()

    def check(self) -> None:
        """Check the process if the last check is `_CHECK_S` ago; called with every report of metrics."""
        if not self._warned and time.monotonic() - self._checked > _CHECK_S:
            self._checked = time.monotonic()
            if trouble := self._trouble():
                self._warn(f"{trouble}; the run continues")

    def finish(self) -> None:
        """Wait until the rest is sent; a process that takes too long is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if children.wait_or_kill(self._process, _END_S) < 0:
            self._warn("it did not accept the rest in time")
        elif self._process.returncode != 0:
            self._warn(self._reason())

    def _trouble(self) -> str | None:
        if self._process.poll() is not None:
            return f"its process ended ({self._reason()})"
        return read_progress(self._folder, self.name).error

    def _reason(self) -> str:
        return read_progress(self._folder, self.name).error or children.last_lines(self.log_path, 1)

    def _warn(self, trouble: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s is missing metrics: %s. They are in %s; run `%s` after the run to send them. Log: %s",
                TRACKERS[self.name].title,
                trouble,
                self._folder / METRICS_FILE,
                as_typed("track", self._folder, self.name),
                self.log_path,
            )
