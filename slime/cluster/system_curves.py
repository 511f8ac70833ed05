"""Writes what the processes of a run use of their machines to `RUN/system.jsonl`, for the dashboard."""

import contextlib
import json
import os
import statistics
import threading
import time
from pathlib import Path

from slime.liveness import usage
from slime.runtime.base import Runtime

SYSTEM_FILE = "system.jsonl"
_DENSE, _MOST = 120, 12  # lines of one reading each; later a line is the mean of more, at most so many


class SystemCurves:
    """A thread that collects readings of this process, of the engines it started, and of all workers."""

    def __init__(self, run_dir: Path, runtime: Runtime):
        self._file, self._runtime, self._ended = run_dir / SYSTEM_FILE, runtime, threading.Event()
        usage.follow("driver", os.getpid())
        self._thread = threading.Thread(target=self._run, name="system-curves", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        number, values = 0, dict[str, list[float]]()
        while not self._ended.wait(usage.INTERVAL_S):
            workers = [notes.usage for notes in self._runtime.notes().values()]
            for name, found in (entry for part in [usage.readings(), *workers] for entry in part.items()):
                for what, value in found.items():
                    values.setdefault(f"system/{name}/{what}", []).append(value)
            number += 1
            if number % min(_MOST, 1 + number // _DENSE) == 0:
                means = {name: round(statistics.fmean(parts), 4) for name, parts in values.items()}
                line = {"time": time.time(), "step_key": "system/time", "step": int(time.time()), **means}
                with contextlib.suppress(OSError), self._file.open("a") as file:  # a full disk: no more
                    file.write(json.dumps(line) + "\n")
                values = {}
