"""The ledger of a run: every event of its groups, samples and steps, in the order they happened.

    issued     a group was handed out: `value` "new" (of the dataset) or "buffer"
    generated  a sample is finished (tokens, log-probs, versions are in `samples`); `value`: how it ended
    recalled   the same, taken from the ledger after a crash instead of generated again
    scored     a group got its rewards together
    kept       a group is part of the batch of this rollout; `value`: the indices of its samples
    dropped    a group left the run; `value`: filtered or failed, with the reason
    returned   a group went back to the buffer
    cut        the rollout is complete: what happened before belongs to it, what comes after to later ones
    made       the batch of the rollout is on the disk as it will be trained on
    consumed   the trainer has made its step with that batch
    committed  a checkpoint after that step is complete
    evaluated  an evaluation is complete
    resumed    a start of the run went on after step `rollout`; `value`: the last rollout it has already

A step that was lost with its process is consumed again: `resumed` says which steps count no more.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slime.record import plain_bytes
from slime.record.schema import RecordError, open_for_reading

logger = logging.getLogger(__name__)

Event = Literal[
    "issued", "generated", "recalled", "scored", "kept", "dropped", "returned", "cut", "made",
    "consumed", "committed", "evaluated", "resumed",
]  # fmt: skip
# After these the disk is asked to have everything, where --record-sync is "step".
MILESTONES = frozenset({"made", "consumed", "committed", "resumed"})


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One event. Example: LedgerRow(31, 2, "kept", 4, 17, None, 0, "[68, 69, 70, 71]")."""

    id: int
    start: int
    event: Event
    rollout: int
    group_index: int | None
    sample_index: int | None
    attempt: int | None
    value: str | None


KeptEntry = tuple[int, int, int, int | None, int | None, str, bytes]  # a row of ledger_samples


class Note(NamedTuple):
    """What a writer adds: an event, and what else is done in the same transaction.

    `entry`: a finished sample that is put where a run that goes on finds it.
    """

    time: float
    event: Event
    rollout: int
    group_index: int | None = None
    sample_index: int | None = None
    attempt: int | None = None
    value: str | None = None
    also: Callable[[sqlite3.Connection], object] | None = None
    entry: KeptEntry | None = None

    def row(self, start: int) -> tuple[object, ...]:
        about = (self.group_index, self.sample_index, self.attempt)
        return (self.time, start, self.event, self.rollout, *about, self.value)


def write_notes(connection: sqlite3.Connection, notes: Sequence[Note], start: int) -> None:
    """Events that waited together, with what belongs to them; `start`: number of the run's start."""
    connection.executemany(
        "INSERT INTO ledger (time, start, event, rollout, group_index, sample_index, attempt, value) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [note.row(start) for note in notes],
    )
    entries: list[KeptEntry] = []
    for note in notes:
        if note.entry is not None:
            entries.append(note.entry)
        if note.also is not None:  # in their order: it may remove what was put there before
            _write_entries(connection, entries)
            entries = []
            note.also(connection)
    _write_entries(connection, entries)


def _write_entries(connection: sqlite3.Connection, entries: Sequence[KeptEntry]) -> None:
    connection.executemany("INSERT OR REPLACE INTO ledger_samples VALUES (?, ?, ?, ?, ?, ?, ?)", entries)


@dataclass(frozen=True, slots=True)
class FinishedEntry:
    """A sample (or the siblings of a fan-out) that was finished when the run ended, by what it began from."""

    version: int | None
    payload: bytes

    @property
    def is_fan_out(self) -> bool:
        return bool(plain_bytes.loads(self.payload)["fan_out"])

    def samples(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = plain_bytes.loads(self.payload)["samples"]
        return found


class LedgerReader:
    """Questions of a run that goes on, and of `slime ledger`. Use it in a `with`."""

    def __init__(self, path: Path):
        self._path, self._connection = path, open_for_reading(path)

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def _ask(self, query: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # schema 1
                return []
            raise RecordError(f"{self._path} cannot be read: {error}.") from error
        except sqlite3.Error as error:
            raise RecordError(f"{self._path} cannot be read: {error}.") from error

    def meta(self, key: str) -> str | None:
        rows = self._ask("SELECT value FROM meta WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    def events(self) -> list[LedgerRow]:
        """All of them, in the order they happened."""
        columns = "id, start, event, rollout, group_index, sample_index, attempt, value"
        return [LedgerRow(*row) for row in self._ask(f"SELECT {columns} FROM ledger ORDER BY id")]

    def rollouts_after(self, step: int, settings: str) -> dict[int, Any]:
        """Complete rollouts that follow a step without a gap, made with these settings."""
        rows = self._ask(
            "SELECT rollout_id, settings, payload FROM ledger_rollouts WHERE rollout_id > ? ORDER BY 1",
            (step,),
        )
        found: dict[int, Any] = {}
        for rollout_id, made_with, payload in rows:
            if rollout_id != step + 1 + len(found) or made_with != settings:
                break
            found[rollout_id] = plain_bytes.loads(payload)
        return found

    def rollout(self, rollout_id: int, settings: str) -> Any | None:
        """A complete rollout; None: it is not kept, or was made with other settings."""
        rows = self._ask(
            "SELECT payload FROM ledger_rollouts WHERE rollout_id = ? AND settings = ?",
            (rollout_id, settings),
        )
        return plain_bytes.loads(rows[0][0]) if rows else None

    def finished_entries(self, settings: str) -> dict[tuple[int, int, int], FinishedEntry]:
        """Finished entries by sample index, attempt, and tokens at the start of generation."""
        rows = self._ask(
            "SELECT sample_index, attempt, started, version, payload FROM ledger_samples WHERE settings = ?",
            (settings,),
        )
        return {(index, attempt, started): FinishedEntry(*rest) for index, attempt, started, *rest in rows}

    def is_evaluated(self, rollout_id: int) -> bool:
        rows = self._ask(
            "SELECT 1 FROM ledger WHERE event = 'evaluated' AND rollout = ? LIMIT 1", (rollout_id,)
        )
        return bool(rows)


def keep_entry(
    key: tuple[int, int, int],
    group_index: int | None,
    version: int | None,
    settings: str,
    value: object,
    *,
    is_small: bool = False,  # it holds few numbers
) -> KeptEntry | None:
    """A finished sample as the ledger keeps it. At once: what it is made of may change later.

    None: it holds something that no file can.
    """
    pack = plain_bytes.dumps_small if is_small else plain_bytes.dumps
    payload = _packed(value, f"sample {key[0]}", pack)
    return None if payload is None else (*key, group_index, version, settings, payload)


def keep_rollout(rollout_id: int, settings: str, value: object) -> Callable[[sqlite3.Connection], object]:
    """Puts a whole rollout where a run that goes on finds it."""

    def keep(connection: sqlite3.Connection) -> None:
        payload = _packed(value, f"rollout {rollout_id}")
        if payload is not None:
            values = (rollout_id, settings, payload)
            connection.execute("INSERT OR REPLACE INTO ledger_rollouts VALUES (?, ?, ?)", values)

    return keep


def _packed(value: object, name: str, pack: Callable[[Any], bytes] = plain_bytes.dumps) -> bytes | None:
    """None: it holds something that no file can, so that after a crash it is made again."""
    try:
        return pack(value)
    except plain_bytes.ForeignValue as error:
        logger.info("%s holds %s: it is not kept, and made again after a crash", name, error)
        return None


def forget_entries(groups: list[int]) -> Callable[[sqlite3.Connection], object]:
    """These groups are decided: what became of them is in a rollout, or in its cursor."""
    return lambda connection: connection.executemany(
        "DELETE FROM ledger_samples WHERE group_index = ?", [(group,) for group in groups]
    )


def forget_rollouts(*, up_to: int | None = None, after: int | None = None) -> Callable[..., object]:
    """Those that a checkpoint covers, or those that a run did not go on with."""

    def forget(connection: sqlite3.Connection) -> None:
        if up_to is not None:
            connection.execute("DELETE FROM ledger_rollouts WHERE rollout_id <= ?", (up_to,))
        if after is not None:
            connection.execute("DELETE FROM ledger_rollouts WHERE rollout_id > ?", (after,))

    return forget
