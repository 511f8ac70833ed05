"""`slime status RUN` and `slime watch RUN`: how a run is doing and what it waits for, now or at its end."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from slime.observability import phases
from slime.observability.incidents import describe_incidents, read_incidents
from slime.observability.terminal.progress import Progress, duration, short, sparkline
from slime.observability.terminal.terminal import Terminal
from slime.observability.tracking import read_metrics
from slime.observability.wait_table import WaitTable, read_table
from slime.utils.files.folder_lock import holder_here, is_locked
from slime.utils.files.run_file import METRICS_FILE, RunRecord, no_run, read_run
from slime.utils.machine.vital_signs import signs_of
from slime.utils.printable import printable

_EVERY_S = 2.0
_LIVE = ("running", phases.PAUSED)
_LATE_S = 10.0  # from then on the table of waits is said to be old
_SHOWN_WAITS = 12
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
    ("wasted tokens", "rollout/waste/share", "{:.0%}"),
)


@dataclass(frozen=True, slots=True)
class Status:
    """What the folder of a run says: `state` is running, paused, finished, or how it ended.

    `values`: the last of each metric. `waits` None: nobody waited for anything, or it is not known.
    """

    name: str
    state: str
    lines: tuple[str, ...]
    values: dict[str, float]
    waits: WaitTable | None

    @property
    def is_over(self) -> bool:
        return self.state not in _LIVE


def status_main(argv: Sequence[str]) -> int:
    """Print the status once."""
    parser = _parser("slime status")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object, for scripts")
    options = parser.parse_args(argv)
    status = _read(options.run)
    if isinstance(status, str):
        print(f"error: {status}", file=sys.stderr)
        return 2
    print(_as_json(status) if options.json else "\n".join(status.lines))
    return 0


def _as_json(status: Status) -> str:
    table = status.waits
    rows = [
        {**asdict(row), "age_s": row.age_s(table.time), "overdue": row.is_overdue(table.time)}
        for row in (table.rows if table is not None else ())
        if table is not None
    ]
    return json.dumps({"name": status.name, "state": status.state, "metrics": status.values, "waits": rows})


def watch_main(argv: Sequence[str]) -> int:
    """Print the status again and again until the run ends; on a terminal in one place."""
    run = _parser("slime watch").parse_args(argv).run
    status = _read(run)
    if isinstance(status, str):
        print(f"error: {status}", file=sys.stderr)
        return 2
    terminal = Terminal()
    if not terminal.is_live:
        return _watch_plainly(run, status)
    try:
        while True:
            width = terminal.size[0] - 4
            terminal.show(
                [line for text in status.lines for line in Text(text).wrap(terminal.console, width)]
            )
            if status.is_over:
                return 0
            time.sleep(_EVERY_S)
            newer = _read(run)
            status = status if isinstance(newer, str) else newer
    finally:
        terminal.settle(keep=True)


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


def _read(run: Path) -> Status | str:
    """A str says why the folder has no status."""
    held = is_locked(run, "--run-dir")  # looked at first: a run writes how it ended, and then lets go
    record = read_run(run)
    if record is None:
        return no_run(run)
    rows = read_metrics(run) if (run / METRICS_FILE).is_file() else []
    # No end is written and nobody held the folder: it is lost, unless another start took it just now.
    running = held or (record.last.exit is None and is_locked(run, "--run-dir"))
    state = "running" if running else record.last.exit or "lost: the process ended without a word"
    # A run that came to its end waits for nothing; of one that was stopped it is told why it was.
    table = read_table(run) if state != "finished" else None
    if running and table is not None and table.is_paused:
        state = phases.PAUSED
    lines, values = _lines(run, record, state, rows)
    lines[1:1] = _stopped_lines(run) if running else []
    lines += _wait_lines(table, running) if table is not None else []
    return Status(record.name, state, tuple(map(printable, lines)), values, table)


def _stopped_lines(run: Path) -> list[str]:
    """A driver that is stopped watches nobody: nothing of the run goes on, and nothing else would tell."""
    driver = holder_here(run, "--run-dir")
    signs = signs_of([driver]) if driver is not None else None
    if signs is None or not signs.stopped:
        return []
    return [f"  its driver (process {driver}) is stopped (SIGSTOP): `kill -CONT {driver}` lets it go on"]


def _wait_lines(table: WaitTable, running: bool) -> list[str]:
    """Overdue ones first; phases of the run are waits like others."""
    if not table.rows:
        return []
    silent_s = time.time() - table.time
    late = f", as of {datetime.timedelta(seconds=round(silent_s))} ago" if silent_s > _LATE_S else ""
    title = f"  waits{late}:" if running else "  waits when it ended:"
    rows = [f"    {row.told(table.time)}" for row in table.rows[:_SHOWN_WAITS]]
    more = len(table.rows) - len(rows)
    return [title, *rows, *([f"    and {more} more (--json shows all)"] if more > 0 else [])]


def _lines(
    run: Path, record: RunRecord, state: str, rows: list[dict[str, Any]]
) -> tuple[list[str], dict[str, float]]:
    started = datetime.datetime.fromisoformat(record.last.start)
    ended = datetime.datetime.fromisoformat(record.last.end) if record.last.end else None
    last = max((row["time"] for row in rows if "time" in row), default=None)
    until = ended.timestamp() if ended else time.time() if state in _LIVE else last or started.timestamp()
    took = datetime.timedelta(seconds=round(max(0.0, until - started.timestamp())))
    again = f", start {record.num_starts}" if record.num_starts > 1 else ""
    so_far = "so far" if state in _LIVE else "in all"
    lines = [
        f"{record.name} ({record.id}{again}): {state}",
        f"  started {record.last.start}, {took} {so_far}",
    ]
    progress = Progress(_total(record), done_key="rollout/num_samples")
    for row in rows:
        progress.add(row)
    values = progress.latest
    lines.append(f"  {_how_far(progress, state)}")
    if last is not None and state in _LIVE:
        lines.append(f"  last logged {datetime.timedelta(seconds=round(time.time() - last))} ago")
    shown = [f"{title} {form.format(values[key])}" for title, key, form in _SHOWN if key in values]
    lines += [f"  {', '.join(shown[i : i + 3])}" for i in range(0, len(shown), 3)]
    if len(progress.values) > 1:
        lines.append(f"  {progress.value_name} {sparkline(list(progress.values.values()), 40)}")
    if split := progress.split():
        lines.append(
            "  " + ", ".join(f"{name} {share:.0%}" for name, share in split.items()) + _speed(progress)
        )
    lines += [f"  {key} {values[key]:.4g}" for key in progress.evals]
    lines += [f"  wasted: {progress.waste_words()}"] if progress.waste_words() else []
    lines += [f"  {line}" for line in describe_incidents(read_incidents(run, started.timestamp()))]
    if record.last.restarts:
        lines.append(f"  {record.last.told_restarts}")
    if record.last.checkpoints:
        lines.append(f"  checkpoints in {record.last.checkpoints}")
    return lines, dict(values)


def _total(record: RunRecord) -> int | None:
    total = (record.last.settings.get("num_rollout") or {}).get("value")
    return total if isinstance(total, int) else None


def _how_far(progress: Progress, state: str) -> str:
    if not progress.done:
        return "no step yet"
    text = f"step {progress.done}/{progress.total}" if progress.total else f"step {progress.done}"
    left = progress.seconds_left()
    return f"{text}, about {duration(left)} left" if state in _LIVE and left is not None else text


def _speed(progress: Progress) -> str:
    tokens = progress.tokens_per_second()
    return "" if tokens is None else f"; {short(tokens)} tok/s"


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(name, description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    return parser


main = status_main
