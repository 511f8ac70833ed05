"""`slime status RUN` and `slime watch RUN`: how a run is doing, from another shell, now or after its end."""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from slime.observability.tracking import read_metrics
from slime.utils.folder_lock import is_locked
from slime.utils.printable import printable
from slime.utils.run_file import METRICS_FILE, RunRecord, read_run

_EVERY_S = 2.0
_SHOWN = (
    ("reward", "rollout/raw_reward", "{:.4g}"),
    ("answer length", "rollout/response_len/mean", "{:.0f} tokens"),
    ("cut at the limit", "rollout/truncated_ratio", "{:.0%}"),
    ("loss", "train/loss", "{:.4g}"),
    ("grad norm", "train/grad_norm", "{:.4g}"),
    ("entropy", "train/entropy_loss", "{:.4g}"),
    ("step time", "perf/step_time", "{:.1f} s"),
    ("generation", "perf/rollout_time", "{:.1f} s"),
    ("training", "perf/train_time", "{:.1f} s"),
    ("staleness", "rollout/staleness/mean", "{:.2g}"),
)


@dataclass(frozen=True, slots=True)
class Status:
    """What the folder of a run says: `state` is running, finished, or how it ended."""

    name: str
    state: str
    lines: tuple[str, ...]

    @property
    def is_over(self) -> bool:
        return self.state != "running"


def status_main(argv: Sequence[str]) -> int:
    """Print the status once."""
    run = _parser("slime status").parse_args(argv).run
    status = _read(run)
    if isinstance(status, str):
        print(f"error: {status}", file=sys.stderr)
        return 2
    print("\n".join(status.lines))
    return 0


def watch_main(argv: Sequence[str]) -> int:
    """Print the status again and again until the run ends; on a terminal in one place."""
    run = _parser("slime watch").parse_args(argv).run
    status = _read(run)
    if isinstance(status, str):
        print(f"error: {status}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    if not console.is_terminal:
        return _watch_plainly(run, status)
    with Live(_as_text(status), console=console, auto_refresh=False) as live:
        while not status.is_over:
            time.sleep(_EVERY_S)
            newer = _read(run)
            status = status if isinstance(newer, str) else newer
            live.update(_as_text(status), refresh=True)
    return 0


def _watch_plainly(run: Path, status: Status) -> int:
    shown: tuple[str, ...] = ()
    while True:
        if status.lines[1:] != shown[1:]:
            print("\n".join(status.lines), flush=True)
        if status.is_over:
            return 0
        shown = status.lines
        time.sleep(_EVERY_S)
        newer = _read(run)
        status = status if isinstance(newer, str) else newer


def _as_text(status: Status) -> Text:
    return Text("\n".join(status.lines))


def _read(run: Path) -> Status | str:
    """A str says why the folder has no status."""
    record = read_run(run)
    if record is None:
        return f"{run} is no folder of a run: run.json is missing or cannot be read."
    rows = read_metrics(run) if (run / METRICS_FILE).is_file() else []
    state = _state(run, record)
    return Status(record.name, state, tuple(map(printable, _lines(run, record, state, rows))))


def _state(run: Path, record: RunRecord) -> str:
    if is_locked(run, "--run-dir"):
        return "running"
    return record.last.exit or "lost: the process ended without a word"


def _lines(run: Path, record: RunRecord, state: str, rows: list[dict[str, Any]]) -> list[str]:
    started = datetime.datetime.fromisoformat(record.last.start)
    ended = datetime.datetime.fromisoformat(record.last.end) if record.last.end else None
    last = max((row["time"] for row in rows if "time" in row), default=None)
    until = ended.timestamp() if ended else time.time() if state == "running" else last or started.timestamp()
    took = datetime.timedelta(seconds=round(max(0.0, until - started.timestamp())))
    again = f", start {record.num_starts}" if record.num_starts > 1 else ""
    so_far = "so far" if state == "running" else "in all"
    lines = [
        f"{record.name} ({record.id}{again}): {state}",
        f"  started {record.last.start}, {took} {so_far}",
    ]
    values: dict[str, float] = {}
    for row in rows:
        values |= {key: value for key, value in row.items() if isinstance(value, (int, float))}
    lines.append(f"  {_progress(record, rows, values, state)}")
    if last is not None and state == "running":
        lines.append(f"  last logged {datetime.timedelta(seconds=round(time.time() - last))} ago")
    shown = [f"{title} {form.format(values[key])}" for title, key, form in _SHOWN if key in values]
    lines += [f"  {', '.join(shown[i : i + 4])}" for i in range(0, len(shown), 4)]
    scores = [key for key in values if key.startswith("eval/") and "-" not in key and key.count("/") == 1]
    lines += [f"  {key} {values[key]:.4g}" for key in scores]
    if record.last.checkpoints:
        lines.append(f"  checkpoints in {record.last.checkpoints}")
    return lines


def _progress(record: RunRecord, rows: list[dict[str, Any]], values: dict[str, float], state: str) -> str:
    steps = {int(row["step"]) for row in rows if "rollout/num_samples" in row and "step" in row}
    if not steps:
        return "no step yet"
    total = (record.last.settings.get("num_rollout") or {}).get("value")
    done = max(steps) + 1
    text = f"step {done}/{total}" if total else f"step {done}"
    if state == "running" and total and "perf/step_time" in values:
        left = datetime.timedelta(seconds=round((total - done) * values["perf/step_time"]))
        text += f", about {left} left"
    return text


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(name, description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    return parser


main = status_main
