"""`slime ask RUN ACTION [VALUE]`: pause a run, save a checkpoint now, change its learning rate, ..."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime.catalog.actions import ACTIONS
from slime.dashboard.run_folder import RUNNING, RunFolder
from slime.record import RECORD_FILE, RecordError
from slime.record.actions import ASKED, DONE, ActionRow, ask, read_actions
from slime.record.schema import open_for_reading
from slime.utils.files.run_file import no_run, read_run
from slime.utils.machine.own_command import as_typed
from slime.utils.printable import printable

_POLL_S = 0.5
_WHO = "slime ask"
_MISTAKE, _NOT_DONE, _INTERRUPTED = 2, 1, 130  # exit codes


def main(argv: Sequence[str]) -> int:
    """Write the request into the record of the run, wait until the run answers, and print the answer."""
    options = _parser().parse_args(argv)
    folder: Path = options.run
    words = [word for word in options.action if word != "set"]  # `set lr 1e-6` reads well, too
    try:
        if not words:
            print("\n".join(_listed(folder)))
            return 0
        row = _ask(folder, words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return _MISTAKE
    print("asked: the run does it after the step that it is in", flush=True)
    if options.no_wait:
        return 0
    try:
        return _wait_for_answer(folder, row)
    except KeyboardInterrupt:
        print("no longer waiting; the run does it all the same", file=sys.stderr)
        return _INTERRUPTED


def _ask(folder: Path, words: list[str]) -> int:
    """The number of the request; ValueError: the run cannot take it."""
    name, values = words[0].replace("-", "_"), words[1:]
    if len(values) > 1:
        raise ValueError(f"unexpected {values[1]!r}: an action has one value at most.")
    try:
        value = float(values[0]) if values else None
    except ValueError:
        raise ValueError(f"{words[0]}: {values[0]!r} is no number.") from None
    if name not in ACTIONS:
        raise ValueError(f"{words[0]!r} is no action; there are {', '.join(ACTIONS)}.")
    _need_run(folder)
    state = RunFolder(folder, "run").state
    if state != RUNNING:
        raise ValueError(
            f"{folder}: this run has ended ({printable(state)}), so nobody would do it. Start it again with "
            "the flags that you want."
        )
    return ask(folder, name, value, _WHO)


def _need_run(folder: Path) -> None:
    if read_run(folder) is None:
        raise ValueError(no_run(folder))


def _wait_for_answer(folder: Path, number: int) -> int:
    """Print what the run answers; also where it ends before."""
    run = RunFolder(folder, "run")
    while True:
        is_over = run.state != RUNNING  # before the row is read: a run answers, and then ends
        row = next(row for row in _rows(folder) if row.id == number)
        if row.state != ASKED:
            print(printable(f"{row.state}: {row.answer}"))
            return 0 if row.state == DONE else _NOT_DONE
        if is_over:
            print(f"error: the run ended before it answered ({printable(run.state)})", file=sys.stderr)
            return _NOT_DONE
        time.sleep(_POLL_S)


def _rows(folder: Path) -> list[ActionRow]:
    with contextlib.closing(open_for_reading(folder / RECORD_FILE)) as connection:
        return read_actions(connection)


def _listed(folder: Path) -> list[str]:
    """What can be asked, and what was."""
    _need_run(folder)
    lines = [f"{as_typed('ask', folder)} ACTION, where ACTION is:"]
    for name, action in ACTIONS.items():
        lines.append(f"  {name + ' NUMBER' if action.setting else name:<20} {action.what}")
    with contextlib.suppress(RecordError):
        for row in _rows(folder)[-10:]:
            when = time.strftime("%H:%M:%S", time.localtime(row.time))
            value = "" if row.value is None else f" {row.value:g}"
            lines.append(
                printable(f"{when} {row.name}{value}, {row.who}: {row.answer or 'not answered yet'}")
            )
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime ask", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run that is going on")
    names = ", ".join(f"{name} NUMBER" if action.setting else name for name, action in ACTIONS.items())
    parser.add_argument(
        "action", nargs="*", metavar="ACTION", help=f"{names}; none: list them, and what was asked before"
    )
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the answer of the run")
    return parser
