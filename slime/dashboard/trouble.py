"""Lists the problems of a run, worst first: how it ended, silence, counted failures, advice."""

import statistics
import time
from typing import Any

from slime.dashboard.run_folder import LOST, RUNNING, RunFolder
from slime.liveness.wait_table import read_table
from slime.record.place import describe_copy

_SILENT_S = 300.0
_OVERDUE = 5.0  # times the usual length of a step
# Metrics that are 0 in a healthy run, with their meaning.
_COUNTED = {
    "rollout/groups/failed": "prompt groups failed",
    "rollout/groups/samples_failed": "samples came back without a result",
    "train/nonfinite_steps": "optimizer steps were skipped: a value was NaN or infinite",
    "train/empty_steps": "optimizer steps had no token to train on",
    "perf/engines_evicted": "engines were removed from the fleet by a weight push",
    "perf/engines_missed": "engines were not reached by a weight push",
}


def trouble_of(run: RunFolder) -> list[dict[str, Any]]:
    """Return entries of severity, title, text and the view with details."""
    found = _ending(run)
    found += _overdue(run) + _silence(run) if run.state == RUNNING else []
    for name, words in _COUNTED.items():
        total = run.curves.total(name)
        if total:
            found.append(
                _entry("warning", f"{total:g} {words}", f"{name} is 0 in a healthy run", "curves", name)
            )
    failures = {n: run.curves.total(n) for n in run.curves.names() if n.startswith("rollout/reward_failure/")}
    for name, total in failures.items():
        if total:
            kind = name.rpartition("/")[2]
            found.append(_entry("warning", f"{total:g} rewards failed ({kind})", name, "curves", name))
    missed = run.record_facts().get("missed")
    if missed:
        found.append(
            _entry("warning", f"{missed} rollouts are not in the record", "it could not be written", "logs")
        )
    if (copy := describe_copy(run.path)) is not None:
        found.append(_entry("note", "Samples are shown from a copy of the record", copy, "samples"))
    for entry in run.log_trouble.read():
        severity = "error" if entry["kind"] == "error" else "advice"
        found.append(_entry(severity, entry["text"], entry["time"], "logs"))
    ranks = {"error": 0, "warning": 1, "advice": 2, "note": 3}
    return sorted(found, key=lambda entry: ranks[entry["severity"]])


def _ending(run: RunFolder) -> list[dict[str, Any]]:
    found, record = [], run.run
    if run.state not in (RUNNING, "finished") and not run.state.startswith("stopped"):
        title = (
            "The run was lost: its process ended without a final state"
            if run.state == LOST
            else f"Ended: {run.state}"
        )
        severity = "warning" if run.state == "interrupted" else "error"
        found.append(_entry(severity, title, "see the last lines of the log", "logs"))
    for again in record.last.restarts[-5:] if record is not None else ():
        title = f"The trainer was lost and restarted at step {again.get('step')}: {again.get('cause')}"
        text = f"{again.get('time')}; it started from {again.get('begins_from')}"
        found.append(_entry("warning", title, text, "logs"))
    for start in record.earlier if record is not None else ():
        text = f"started {start.start}"
        found.append(_entry("note", f"An earlier start ended: {start.exit or LOST}", text, "settings"))
    return found


def _overdue(run: RunFolder) -> list[dict[str, Any]]:
    """Return waits whose deadline has passed, and processes without heartbeats."""
    table = read_table(run.path)
    if table is None:
        return []
    late = [
        _entry("error", row.describe(table.time), "its deadline has passed", "logs") for row in table.overdue
    ]
    text = "its process may be stopped, or the machine overloaded"
    return late + [_entry("warning", row.describe(table.time), text, "logs") for row in table.silent]


def _silence(run: RunFolder) -> list[dict[str, Any]]:
    last = run.curves.last_time
    if last is None:
        return []
    times = run.curves.newest("perf/step_time", 20)
    usual = statistics.median(times) if times else 60.0
    silent = time.time() - last
    if silent < max(_SILENT_S, _OVERDUE * usual):
        return []
    now = run.record_facts().get("now") or {}
    doing = f" while {now['doing']}" if now.get("doing") else ""
    text = f"steps took {usual:.0f} s before"
    return [_entry("warning", f"Nothing was logged for {silent / 60:.0f} minutes{doing}", text, "timeline")]


def _entry(severity: str, title: str, text: str, view: str, about: str | None = None) -> dict[str, Any]:
    return {"severity": severity, "title": title, "text": text, "view": view, "about": about}
