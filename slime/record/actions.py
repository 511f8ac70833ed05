"""Requests to an active run: files in its folder, which the loop reads and replies to between two steps.

`RUN/requests/<id>.json` is one request, and later the run's reply. Files work from every host that sees the
run's folder, also where the record is on a local disk of the driver's host. The reply is written to the
record too; once the record that others read has it, the file is removed.
"""

import contextlib
import json
import sqlite3
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from slime.catalog.actions import ACTIONS
from slime.record.place import record_file, written_elsewhere
from slime.record.schema import RecordError
from slime.utils.files.restricted import create_restricted

ASKED, DONE, REFUSED = "asked", "done", "refused"
_FOLDER = "requests"
_COLUMNS = "id, time, name, value, who, state, answered, rollout_id, answer"


@dataclass(frozen=True, slots=True)
class ActionRow:
    """One request. `reply_time`, `rollout_id` and `reply` are None until the run responds.

    Example: ActionRow(3, 1754820000.1, "lr", 5e-7, "page", "done", 1754820003.0, 12, "1e-06 -> 5e-07").
    """

    id: int
    time: float
    name: str
    value: float | str | None  # a text: the address of an engine
    who: str
    state: str
    reply_time: float | None
    rollout_id: int | None
    reply: str | None


def ask(run_dir: str | Path, name: str, value: float | str | None, who: str) -> int:
    """Write a request into the folder of a run, and return its number. ValueError: it is not valid."""
    if name not in ACTIONS:
        raise ValueError(f"{name!r} is not an action; choose from {', '.join(ACTIONS)}")
    wrong = ACTIONS[name].wrong_value(value)
    if wrong:
        raise ValueError(f"{name}: {wrong}")
    file = record_file(Path(run_dir))
    if not file.is_file() and written_elsewhere(Path(run_dir)) is None:
        raise RecordError(f"{file} does not exist: the run keeps no record, and takes no requests.")
    number, folder = time.time_ns() // 1000, Path(run_dir, _FOLDER)
    try:
        folder.mkdir(exist_ok=True)
        while True:  # microseconds are exact numbers in a browser; two requests never share one
            with contextlib.suppress(FileExistsError):
                (folder / f"{number}.part").open("x").close()
                break
            number += 1
        _write(folder, ActionRow(number, time.time(), name, value, who, ASKED, None, None, None))
    except OSError as error:
        raise RecordError(f"{folder} cannot be written: {error.strerror}.") from error
    return number


def read_actions(
    run_dir: Path, connection: sqlite3.Connection | None, state: str | None = None
) -> list[ActionRow]:
    """Return the actions, the oldest first; `state`: only those in this state.

    `connection`: to the run's record; None: this host has no copy of it yet.
    """
    rows = {row.id: row for row in _recorded(connection)} if connection is not None else {}
    for file in Path(run_dir, _FOLDER).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # removed meanwhile, or not ours
            row = ActionRow(**json.loads(file.read_text()))
            if row.id not in rows or rows[row.id].state == ASKED:
                rows[row.id] = row
    return [rows[number] for number in sorted(rows) if state in (None, rows[number].state)]


def _recorded(connection: sqlite3.Connection) -> list[ActionRow]:
    return [ActionRow(*row) for row in connection.execute(f"SELECT {_COLUMNS} FROM actions")]


def write_reply(connection: sqlite3.Connection, run_dir: Path, row: ActionRow) -> None:
    """Write an action with its reply into the record, and into its file."""
    values = tuple(asdict(row).values())
    connection.execute(f"INSERT OR REPLACE INTO actions ({_COLUMNS}) VALUES (?{', ?' * 8})", values)
    if (run_dir / _FOLDER / f"{row.id}.json").exists():
        _write(run_dir / _FOLDER, row)


def forget_replied(connection: sqlite3.Connection, run_dir: Path) -> None:
    """Remove the files of actions that the record has with their replies."""
    for row in _recorded(connection):
        if row.state != ASKED:
            (run_dir / _FOLDER / f"{row.id}.json").unlink(missing_ok=True)


def _write(folder: Path, row: ActionRow) -> None:
    part = folder / f"{row.id}.part"
    create_restricted(part)
    part.write_text(json.dumps(asdict(row)))
    part.replace(folder / f"{row.id}.json")
