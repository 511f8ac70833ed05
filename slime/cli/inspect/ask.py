"""`slime ask RUN ACTION [VALUE]`: pause or stop a run, save or evaluate now, change its learning rate."""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime.catalog.actions import ACTIONS
from slime.cli.inspect import command, need_run, run_parser
from slime.dashboard.run_folder import RUNNING, RunFolder
from slime.record import RecordError, record_file
from slime.record.actions import ASKED, DONE, ActionRow, ask, read_actions
from slime.record.schema import open_for_reading
from slime.utils.machine.own_command import as_typed
from slime.utils.printable import printable

_POLL_S = 0.5
_NOT_DONE = 1  # exit code
_USAGES = {
    name: f"{name} {'NUMBER' if action.setting else 'ADDRESS' if action.of_engine else ''}".rstrip()
    for name, action in ACTIONS.items()
}


@command
def main(argv: Sequence[str]) -> int:
    """Write the request into the folder of the run, wait until the run replies, and print the reply."""
    options = _parser().parse_args(argv)
    folder: Path = options.run
    words = [word for word in options.action if word != "set"]  # `set lr 1e-6` reads well, too
    need_run(folder)
    if not words:
        print("\n".join(_listed(folder)))
        return 0
    number = request(folder, words)
    print("requested: it takes effect after the current step", flush=True)
    return 0 if options.no_wait else wait_for_reply(folder, number)


def request(folder: Path, words: list[str]) -> int:
    """Write the request and return its number; ValueError where the run cannot take it."""
    name, values = words[0].replace("-", "_"), words[1:]
    if len(values) > 1:
        raise ValueError(f"unexpected {values[1]!r}: an action takes at most one value.")
    value = _number(values[0]) if values else None
    if name not in ACTIONS:
        raise ValueError(f"{words[0]!r} is not an action; choose from {', '.join(ACTIONS)}.")
    state = RunFolder(folder, "run").state
    if state != RUNNING:
        raise ValueError(
            f"{folder}: this run has ended ({printable(state)}), so it takes no actions. Start it again with "
            "the flags that you want."
        )
    return ask(folder, name, value, "slime ask")


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word  # an address


def wait_for_reply(folder: Path, number: int) -> int:
    """Print the reply of the run, or that it ended without one."""
    run = RunFolder(folder, "run")
    while True:
        is_over = run.state != RUNNING  # read before the row: a run replies, then ends
        row = next((row for row in _rows(folder) if row.id == number), None)  # None: it becomes visible soon
        if row is not None and row.state != ASKED:
            print(printable(f"{row.state}: {row.reply}"))
            return 0 if row.state == DONE else _NOT_DONE
        if is_over:
            print(f"error: the run ended before it replied ({printable(run.state)})", file=sys.stderr)
            return _NOT_DONE
        time.sleep(_POLL_S)


def _rows(folder: Path) -> list[ActionRow]:
    if not record_file(folder).exists():  # on another host than the driver's, before the first copy
        return read_actions(folder, None)
    with contextlib.closing(open_for_reading(record_file(folder))) as connection:
        return read_actions(folder, connection)


def _listed(folder: Path) -> list[str]:
    """List the actions and the last requests."""
    lines = [f"{as_typed('ask', folder)} ACTION, where ACTION is:"]
    lines += [f"  {_USAGES[name]:<20} {action.what}" for name, action in ACTIONS.items()]
    with contextlib.suppress(RecordError):
        for row in _rows(folder)[-10:]:
            when = time.strftime("%H:%M:%S", time.localtime(row.time))
            shown = f"{row.value:g}" if isinstance(row.value, float) else row.value
            value = "" if shown is None else f" {shown}"
            lines.append(printable(f"{when} {row.name}{value}, {row.who}: {row.reply or 'no reply yet'}"))
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = run_parser("ask", __doc__)
    names = f"{', '.join(_USAGES.values())}; without one: list actions and past requests"
    parser.add_argument("action", nargs="*", metavar="ACTION", help=names)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the run replies")
    return parser
