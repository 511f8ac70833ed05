"""Requests to an active run: rows in its record, which the loop reads and replies to between two steps."""

import contextlib
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from slime.catalog.actions import ACTIONS
from slime.record.place import record_file, written_elsewhere
from slime.record.schema import RecordError, open_for_asking

ASKED, DONE, REFUSED = "asked", "done", "refused"
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
    """Write a request into the record of a run, and return its number. ValueError: it is not valid."""
    file = record_file(Path(run_dir))
    if name not in ACTIONS:
        raise ValueError(f"{name!r} is not an action; choose from {', '.join(ACTIONS)}")
    wrong = ACTIONS[name].wrong_value(value)
    if wrong:
        raise ValueError(f"{name}: {wrong}")
    if (host := written_elsewhere(Path(run_dir))) is not None:
        raise RecordError(f"the run's record is on a local disk of {host}: ask there; here is only a copy.")
    with contextlib.closing(open_for_asking(file)) as connection, connection:
        try:
            row = connection.execute(
                "INSERT INTO actions (time, name, value, who, state) VALUES (?, ?, ?, ?, ?)",
                (time.time(), name, value, who, ASKED),
            ).lastrowid
        except sqlite3.Error as error:
            raise RecordError(f"{file} cannot be written: {error}.") from error
    assert row is not None
    return row


def read_actions(connection: sqlite3.Connection, state: str | None = None) -> list[ActionRow]:
    """Return the actions, the oldest first; `state`: only those in this state."""
    where, values = ("WHERE state = ?", (state,)) if state else ("", ())
    rows = connection.execute(f"SELECT {_COLUMNS} FROM actions {where} ORDER BY id", values)
    return [ActionRow(*row) for row in rows]


def write_reply(connection: sqlite3.Connection, row: int, state: str, rollout_id: int, reply: str) -> None:
    connection.execute(
        "UPDATE actions SET state = ?, answered = ?, rollout_id = ?, answer = ? WHERE id = ?",
        (state, time.time(), rollout_id, reply, row),
    )
