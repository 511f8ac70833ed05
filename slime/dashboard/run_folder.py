"""One run for the dashboard: its settings, state and headline metrics, and its record."""

import contextlib
import hashlib
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime.catalog.loss_types import LOSS, curves_of, method_of
from slime.catalog.metrics import find_metric, is_eval_score
from slime.dashboard.curves import Curves
from slime.dashboard.logs import LogTrouble
from slime.dashboard.sample_pages import Positions
from slime.liveness import phases
from slime.liveness.wait_table import read_table
from slime.record import RECORD_FILE, RecordError, record_file
from slime.record.actions import read_actions
from slime.record.labels import read_labels
from slime.record.schema import open_for_reading
from slime.utils.files.folder_lock import is_locked
from slime.utils.files.run_file import RUN_FILE, RunRecord, name_of_run, no_run, read_run, runs_inside

RUNNING, LOST = "running", "lost: the process ended without a word"
_LOOK_S = 1.0  # how long the state of a run is cached
# After the curves that show whether the run learns.
HEADLINES = {
    LOSS.metric: LOSS.title,
    "rollout/response_len/mean": "response length",
    "rollout/truncated_ratio": "truncated",
    "train/entropy_loss": "entropy",
    "train/grad_norm": "grad norm",
    "perf/step_time": "step time (s)",
    "perf/tokens_per_gpu_per_sec": "tokens/s per GPU",
}


class NotARun(ValueError):
    """A folder does not hold a run; the message gives the reason."""


class RunFolder:
    """The folder of one run. `key` names it in URLs."""

    def __init__(self, path: Path, key: str):
        self.path, self.key = path.resolve(), key
        if not (self.path / RUN_FILE).is_file() and not (self.path / RECORD_FILE).is_file():
            raise NotARun(f"{path} is not the folder of a run: it has neither {RUN_FILE} nor {RECORD_FILE}.")
        self.curves, self.system = Curves(self.path), Curves(self.path, "system.jsonl")
        self.positions = Positions()
        self.log_trouble = LogTrouble(self.path)
        self._held = threading.local()
        self._state: tuple[float, str] = (0.0, "")
        self._run: tuple[float, RunRecord | None] = (0.0, None)
        self._group: tuple[RunRecord | None, str] = (None, key)

    # -- what it is

    @property
    def run(self) -> RunRecord | None:
        """Return the content of run.json; None: it cannot be read."""
        with contextlib.suppress(OSError):
            changed = (self.path / RUN_FILE).stat().st_mtime
            if changed != self._run[0]:
                self._run = (changed, read_run(self.path))
        return self._run[1]

    @property
    def group(self) -> str:
        """Return a key that is equal for runs that differ by the seed only."""
        run = self.run
        if self._group[0] is not run or run is None:
            alike = run.settings_without_seed() if run is not None else None
            self._group = (run, hashlib.sha256(alike.encode()).hexdigest()[:12] if alike else self.key)
        return self._group[1]

    @property
    def state(self) -> str:
        """Return the state: running, finished, or how it ended."""
        looked, state = self._state
        if time.monotonic() - looked > _LOOK_S:
            held = is_locked(self.path, "--run-dir")  # first: a run writes how it ended, and then unlocks
            run = self.run
            ended = run.last.exit if run is not None else None
            state = RUNNING if held else ended or LOST
            self._state = (time.monotonic(), state)
        return state

    @property
    def shown_state(self) -> str:
        """Return the state to display: running, paused, finished, or how it ended."""
        return phases.PAUSED if self.paused_since is not None else self.state

    @property
    def paused_since(self) -> float | None:
        """Return when a user paused the run, in seconds since 1970; None: it is not paused."""
        table = read_table(self.path) if self.state == RUNNING else None
        return table.paused_since if table is not None else None

    def summary(self) -> dict[str, Any]:
        """Return the entry for the list of runs, without reading all metrics of a long run."""
        run = self.run
        values, main, total = self.values, curves_of(self.values)[0], self.values.get("num_rollout")
        done, last = self.curves.glance(
            "perf/step_time", lambda name: name == main.metric or is_eval_score(name)
        )
        return {
            "key": self.key,
            "name": self.key,
            "folder": str(self.path),
            "id": run.id if run is not None else None,
            "state": self.shown_state,
            "paused_since": self.paused_since,
            "start": run.last.start if run is not None else None,
            "end": run.last.end if run is not None else None,
            "starts": run.num_starts if run is not None else 1,
            "step": done + 1 if done is not None else 0,
            "total": total if isinstance(total, int) else None,
            "last_time": last.pop("time", None),
            "main": {"name": main.metric, "title": main.title, "last": last.pop(main.metric, None)},
            "evaluations": last,
            "seed": values.get("seed"),
            "group": self.group,
            "model": values.get("hf_checkpoint"),
            "method": method_of(values),
            **read_labels(self.path),
        }

    def details(self) -> dict[str, Any]:
        self.curves.read()
        found = self.summary()
        run = self.run
        headlines = []
        titles = {curve.metric: curve.title for curve in curves_of(self.values)}
        for name, title in {**titles, **HEADLINES}.items():
            summary = self.curves.summary(name)
            if summary is not None:
                headlines.append({"title": title, **summary, **explain(name)})
        for name in self.curves.names():
            if is_eval_score(name):
                summary = self.curves.summary(name)
                headlines.append({"title": name, **(summary or {}), **explain(name)})
        return {
            **found,
            "headlines": headlines,
            "versions": run.last.versions if run is not None else {},
            "machine": run.last.machine if run is not None else {},
            "checkpoints": run.last.checkpoints if run is not None else None,
            "resumed": run.last.resumed if run is not None else None,
            "earlier": [{"start": s.start, "end": s.end, "exit": s.exit} for s in run.earlier] if run else [],
            "record": self.record_facts(),
        }

    @property
    def values(self) -> dict[str, Any]:
        """Return the settings without their sources; empty: they are not known."""
        return self.run.last.values if self.run is not None else {}

    def settings(self) -> dict[str, Any]:
        run = self.run
        return run.last.settings if run is not None else {}

    # -- the record

    @contextlib.contextmanager
    def record(self) -> Iterator[sqlite3.Connection]:
        """Open this thread's connection to the record; RecordError where it cannot be read."""
        file = record_file(self.path)
        connection, inode = getattr(self._held, "found", (None, None))
        try:
            now = file.stat().st_ino
        except OSError:
            now = None
        if connection is None or inode != now:
            if connection is not None:
                connection.close()
            self._held.found = (None, None)
            connection = open_for_reading(file)
            self._held.found = (connection, now)
            self.positions = Positions()  # the record may be another file now
        try:
            yield connection
        except sqlite3.Error as error:
            raise RecordError(f"{file} cannot be read: {error}.") from error

    def record_facts(self) -> dict[str, Any]:
        """Return the size of the record, or why there is none."""
        try:
            with self.record() as connection:
                [(rollouts, samples)] = connection.execute(
                    "SELECT count(*), coalesce(sum(CASE WHEN pruned THEN 0 ELSE num_samples END), 0) "
                    "FROM rollouts"
                )
                meta = dict(connection.execute("SELECT key, value FROM meta"))
                actions = read_actions(self.path, connection)
        except RecordError as error:
            return {"missing": str(error), "rollouts": 0, "samples": 0, "schema": 0, "actions": []}
        return {
            "missing": None,
            "rollouts": rollouts,
            "samples": samples,
            "schema": int(meta.get("schema", 1)),
            "missed": int(meta.get("missed_rollouts", 0)),
            "now": json.loads(meta["now"]) if "now" in meta else None,
            "actions": [asdict(row) for row in actions[-50:]],
        }


def explain(name: str) -> dict[str, str]:
    """Return meaning and normal range of a metric from the glossary; empty for a user's metric."""
    row = find_metric(name)
    return {"what": row.what, "normal": row.normal} if row is not None else {"what": "", "normal": ""}


def open_runs(paths: list[Path]) -> dict[str, RunFolder]:
    """Return runs by key: the folder's name, with the parent's name or a number where two are equal.

    A folder that is not a run is replaced by the runs in it.
    """
    folders: list[Path] = []
    for path in paths:
        if (path / RUN_FILE).is_file() or (path / RECORD_FILE).is_file():
            folders.append(path)
            continue
        inside = runs_inside(path)
        if not inside:
            raise NotARun(no_run(path))
        folders += inside
    runs: dict[str, RunFolder] = {}
    distinct = list(dict.fromkeys(folder.resolve() for folder in folders))
    names = Counter(name_of_run(folder) for folder in distinct)
    for folder in distinct:
        name = name_of_run(folder) or "run"
        if names[name] > 1:  # the same name in several folders: the name of the parent distinguishes them
            name = f"{(folder.parent.parent if folder.name == 'run' else folder.parent).name}-{name}"
        name = name.replace(",", "_")  # as in lr=0.1,seed=2: the address of a view separates runs by commas
        key, number = name, 2
        while key in runs:
            key, number = f"{name}-{number}", number + 1
        runs[key] = RunFolder(folder, key)
    return runs
