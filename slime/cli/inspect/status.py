"""`slime status RUN` and `slime watch RUN`: a run's state, step, metrics, times and current waits."""

import contextlib
import datetime
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from slime.catalog.loss_types import LOSS, curves_of
from slime.cli.inspect import command, need_run, run_parser
from slime.liveness import phases
from slime.liveness.vital_signs import signs_of
from slime.liveness.wait_table import WaitTable, read_table
from slime.observability.terminal.progress import Progress, duration, short, sparkline
from slime.observability.terminal.terminal import Terminal
from slime.observability.tracking import read_metrics
from slime.record.place import describe_copy
from slime.utils.files.folder_lock import holder_here, is_locked
from slime.utils.files.run_file import METRICS_FILE, RunRecord
from slime.utils.machine.children import last_lines
from slime.utils.printable import printable

_EVERY_S = 2.0
_LIVE = ("running", phases.PAUSED)
_LATE_S = 10.0  # an older table of waits is shown with its age
_SHOWN_WAITS = 12
_SHOWN_PROBLEMS, _PROBLEM_CHARACTERS, _LOG_LINES = 3, 300, 10_000
_PROBLEM = re.compile(r" - (?:WARNING|ERROR): (?!advice: |before the start: )(.*)")
_SHOWN = (
    ("rollout/response_len/mean", "response length", "{:.0f} tokens"),
    ("rollout/truncated_ratio", "truncated", "{:.0%}"),
    (LOSS.metric, LOSS.title, "{:.4g}"),
    ("train/grad_norm", "grad norm", "{:.4g}"),
    ("train/entropy_loss", "entropy", "{:.4g}"),
    ("perf/step_time", "step time", "{:.1f} s"),
    ("perf/rollout_time", "generation", "{:.1f} s"),
    ("perf/train_time", "training", "{:.1f} s"),
    ("rollout/staleness/mean", "staleness", "{:.2g}"),
    ("rollout/waste/share", "wasted tokens", "{:.0%}"),
)


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a run: `state` is running, paused, finished, or how it ended.

    `values`: the latest value of each metric. `waits` None: there are none, or they are not known.
    """

    name: str
    state: str
    lines: tuple[str, ...]
    values: dict[str, float]
    waits: WaitTable | None


@command
def status_main(argv: Sequence[str]) -> int:
    """Print the status once."""
    parser = run_parser("status", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    options = parser.parse_args(argv)
    status = _read(options.run)
    if not options.json:
        print("\n".join(status.lines))
        return 0
    rows = []
    if (table := status.waits) is not None:
        now = table.time
        rows = [{**asdict(r), "age_s": r.age_s(now), "overdue": r.is_overdue(now)} for r in table.rows]
    fields = {"name": status.name, "state": status.state, "metrics": status.values, "waits": rows}
    print(json.dumps(fields))
    return 0


@command
def watch_main(argv: Sequence[str]) -> int:
    """Show the status until the run ends: redrawn on a terminal, printed when it changes elsewhere."""
    run = run_parser("watch", __doc__).parse_args(argv).run
    status, shown = _read(run), tuple[str, ...]()
    terminal = Terminal()
    try:
        while True:
            if terminal.is_live:
                width = terminal.size[0] - 4
                wrapped = [Text(text).wrap(terminal.console, width) for text in status.lines]
                terminal.show([line for lines in wrapped for line in lines])
            elif status.lines[1:] != shown[1:]:
                print("\n".join(status.lines), flush=True)
            if status.state not in _LIVE:
                return 0
            shown = status.lines
            time.sleep(_EVERY_S)
            with contextlib.suppress(ValueError):  # run.json is being replaced
                status = _read(run)
    finally:
        terminal.settle(keep=True)


def _read(run: Path) -> Status:
    held = is_locked(run, "--run-dir")  # read before run.json: a run writes how it ended, then unlocks
    record = need_run(run)
    rows = read_metrics(run) if (run / METRICS_FILE).is_file() else []
    # Without an exit and a lock the run was killed, unless another start has just locked the folder.
    running = held or (record.last.exit is None and is_locked(run, "--run-dir"))
    state = "running" if running else record.last.exit or "lost: the process ended without a word"
    table = read_table(run) if state != "finished" else None
    if running and table is not None and table.is_paused:
        state = phases.PAUSED
    lines, values = _lines(run, record, state, rows)
    lines[1:1] = _stopped_lines(run) if running else []
    lines += _wait_lines(table, running) if table is not None else []
    return Status(record.name, state, tuple(map(printable, lines)), values, table)


def _stopped_lines(run: Path) -> list[str]:
    """Report a driver that was stopped by a signal: it cannot report that itself."""
    driver = holder_here(run, "--run-dir")
    signs = signs_of([driver]) if driver is not None else None
    if signs is None or not signs.stopped:
        return []
    return [f"  its driver (process {driver}) is stopped (SIGSTOP): `kill -CONT {driver}` resumes it"]


def _wait_lines(table: WaitTable, running: bool) -> list[str]:
    """List the waits, overdue ones first."""
    if not table.rows:
        return []
    silent_s = time.time() - table.time
    late = f", as of {datetime.timedelta(seconds=round(silent_s))} ago" if silent_s > _LATE_S else ""
    title = f"  waits{late}:" if running else "  waits when it ended:"
    rows = [f"    {row.describe(table.time)}" for row in table.rows[:_SHOWN_WAITS]]
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
    lines = [f"{record.name} ({record.id}{again}): {state}"]
    lines.append(f"  started {record.last.start}, {took} {so_far}")
    total, curves = record.last.values.get("num_rollout"), curves_of(record.last.values)
    progress = Progress(
        total if isinstance(total, int) else None, main=curves[0], done_key="rollout/num_samples"
    )
    for row in rows:
        progress.add(row)
    values = progress.latest
    lines.append(f"  {_how_far(progress, state)}")
    if last is not None and state in _LIVE:
        lines.append(f"  last logged {datetime.timedelta(seconds=round(time.time() - last))} ago")
    forms = {curve.metric: (curve.title, "{:.4g}") for curve in curves} | {key: row for key, *row in _SHOWN}
    shown = [f"{title} {form.format(values[key])}" for key, (title, form) in forms.items() if key in values]
    lines += [f"  {', '.join(shown[i : i + 3])}" for i in range(0, len(shown), 3)]
    if len(progress.values) > 1:
        lines.append(f"  {progress.main.title} {sparkline(list(progress.values.values()), 40)}")
    if split := progress.split():
        tokens = progress.tokens_per_second()
        speed = "" if tokens is None else f"; {short(tokens)} tok/s"
        lines.append("  " + ", ".join(f"{name} {share:.0%}" for name, share in split.items()) + speed)
    lines += [f"  {key} {values[key]:.4g}" for key in progress.evals]
    if record.last.restarts:
        lines.append(f"  {record.last.restarts_text}")
    lines += _problem_lines(run)
    if (copy := describe_copy(run)) is not None:
        lines.append(f"  {copy}")
    if record.last.checkpoints:
        lines.append(f"  checkpoints in {record.last.checkpoints}")
    return lines, dict(values)


def _problem_lines(run: Path) -> list[str]:
    """List the last evictions, restarts and errors of any process, which the driver has logged."""
    log = last_lines(run / "logs" / "driver.log", _LOG_LINES)
    found = [f"    {text[:_PROBLEM_CHARACTERS]}" for text in _PROBLEM.findall(log)]
    return ["  last warnings and errors in logs/driver.log:", *found[-_SHOWN_PROBLEMS:]] if found else []


def _how_far(progress: Progress, state: str) -> str:
    if not progress.done:
        return "no step yet"
    text = f"step {progress.done}" + (f"/{progress.total}" if progress.total else "")
    left = progress.seconds_left()
    return f"{text}, about {duration(left)} left" if state in _LIVE and left is not None else text


main = status_main
