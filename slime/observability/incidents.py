"""Keeps evictions, restarts and errors of a run in its folder, where `slime status` reads them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime.utils.files.restricted import restricted

INCIDENTS_FILE = "incidents.jsonl"
_MOST = 1000  # of one start; driver.log has all
_TEXT = 2000  # characters of one
_SHOWN, _WIDTH = 5, 200  # on the terminal
# Their warnings are about engines and workers that were lost or restarted.
_OF_LOSSES = (
    "slime.engines.fleet",
    "slime.liveness.heartbeat",
    "slime.runtime.worker_watch",
    "slime.cluster.restart",
)


@dataclass(frozen=True, slots=True)
class Incident:
    """One log line about a loss or an error. `time`: seconds since 1970."""

    time: float
    level: str
    text: str


class _Writer(logging.Handler):
    def __init__(self, file: Path):
        super().__init__(logging.WARNING)
        self._file, self._num, self._pid = file, 0, os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        is_one = record.levelno >= logging.ERROR or record.name.startswith(_OF_LOSSES)
        if not is_one or self._num >= _MOST or os.getpid() != self._pid:
            return
        self._num += 1
        entry = {"time": record.created, "level": record.levelname, "text": record.getMessage()[:_TEXT]}
        with contextlib.suppress(OSError), open(self._file, "a", opener=restricted) as file:
            file.write(json.dumps(entry) + "\n")  # a full disk is reported where it matters


@contextlib.contextmanager
def keeping_incidents(run_dir: Path) -> Iterator[None]:
    """Write evictions, restarts and errors that this process logs to the run folder."""
    writer = _Writer(run_dir / INCIDENTS_FILE)
    logging.getLogger().addHandler(writer)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(writer)


def read_incidents(run_dir: Path, since: float = 0.0) -> list[Incident]:
    """Return the incidents of a run since a time; an incomplete line is skipped."""
    try:
        lines = (run_dir / INCIDENTS_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            found.append(Incident(float(entry["time"]), str(entry["level"]), str(entry["text"])))
    return [incident for incident in found if incident.time >= since]


def describe_incidents(incidents: list[Incident]) -> list[str]:
    """Return lines for the terminal: the number of incidents and the first line of the last few."""
    if not incidents:
        return []
    lines = [f"evictions, restarts and errors: {len(incidents)} (all in logs/driver.log); the last:"]
    for incident in incidents[-_SHOWN:]:
        clock = time.strftime("%H:%M:%S", time.localtime(incident.time))
        lines.append(f"  {clock} {incident.level.lower()}: {incident.text.splitlines()[0][:_WIDTH]}")
    return lines
