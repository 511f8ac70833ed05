"""The run's side of a tracker: starts its process, tells once if nothing arrives, and never waits for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.catalog.trackers import TRACKERS
from slime.observability.trackers.follower import SentProgress, read_progress
from slime.utils.files.run_file import METRICS_FILE
from slime.utils.machine.own_command import as_typed
from slime.utils.machine.processes import import_environment, open_log

logger = logging.getLogger(__name__)

_LOOK_S = 5.0  # between two looks at it
_SILENT_S = 180.0  # without any progress, while there is something to send
_END_S, _END_SILENT_S = 120.0, 15.0  # that the end of a run waits: in all, and for one that stands still


class Feed:
    """One tracker of a run that goes on."""

    def __init__(self, name: str, folder: Path, options: Mapping[str, Any]):
        self.name, self._folder = name, folder
        self.log_path = folder / "logs" / f"tracker-{name}.log"
        command = [sys.executable, "-P", "-m", "slime.observability.trackers.follower", name, str(folder)]
        with open_log(self.log_path, f"tracker {name}") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **import_environment()},
                start_new_session=True,  # Ctrl-C is for the run; this process ends after it
            )
        self._told = False
        self._looked = self._moved = time.monotonic()
        self._at: tuple[int, float] = (-1, 0.0)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already, which the first look tells
            given = {"service": TRACKERS[name].service, "options": dict(options)}
            self._process.stdin.write(json.dumps(given, default=str).encode() + b"\n")
            self._process.stdin.flush()

    def look(self) -> None:
        """Called with every report; costs nothing most of the time."""
        if not self._told and time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            if trouble := self._trouble():
                self._tell(f"{trouble}; the run goes on")

    def finish(self) -> None:
        """The rest is sent, for as long as it moves; whoever hangs is ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._moved = started = time.monotonic()
        while self._process.poll() is None:
            is_open = self._note_progress().pid == self._process.pid  # else its package is being imported
            now = time.monotonic()
            if now - started > _END_S or (is_open and now - self._moved > _END_SILENT_S):
                self._process.kill()
                self._tell("it did not take the rest in time")
                break
            time.sleep(0.05)
        if self._process.wait() != 0:
            self._tell(self._reason())

    def _trouble(self) -> str | None:
        if self._process.poll() is not None:
            return f"its process ended ({self._reason()})"
        progress = self._note_progress()
        if progress.error:
            return progress.error
        waiting = (self._folder / METRICS_FILE).stat().st_size > progress.offset
        if waiting and time.monotonic() - self._moved > _SILENT_S:
            return f"it has taken nothing for {_SILENT_S:.0f} s"
        return None

    def _note_progress(self) -> SentProgress:
        progress = read_progress(self._folder, self.name)
        at = (progress.offset, progress.rollouts_until)
        if at != self._at:
            self._at, self._moved = at, time.monotonic()
        return progress

    def _reason(self) -> str:
        if error := read_progress(self._folder, self.name).error:
            return error
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "no reason given")
        return "no reason given"

    def _tell(self, trouble: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "%s does not get everything: %s. Nothing is lost: %s has it, and after the run "
                "`%s` sends what is missing. Details: %s",
                TRACKERS[self.name].title,
                trouble,
                self._folder / METRICS_FILE,
                as_typed("track", self._folder, self.name),
                self.log_path,
            )
