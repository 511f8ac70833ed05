"""The ledger of a run: every event of its groups, samples and steps, in the order they happened.

    issued     a group was handed out; `value`: "new" (dataset), "buffer", or "own" (a user's data source)
    generated  samples of a group are finished (their tokens are in `samples`); `value`: indices by status
    recalled   a finished sample was restored from the ledger after a crash instead of generated again
    called     a tool or an environment is about to be called in an episode; `value`: the id of the call, and
               whether it may be repeated
    replied    a call has returned; `value`: its id
    answered   a turn of a session is recorded; `value`: the name of its episode
    continued  an episode resumed after a crash; `value`: the id of its next call, and by what
    restarted  an episode started again after a crash; `value`: the id of its first call, and why
    scored     samples got rewards; `value`: the reward of each index, or the rewards of a group in order
    kept       a group is part of the batch of this rollout; `value`: the indices of its samples
    dropped    a group left the run; `value`: filtered or failed, with the reason
    returned   a group went back to the buffer; `value`: the reason, where a rollout worker ended
    cut        the rollout is complete: earlier events belong to it, later ones to the next rollouts
    made       the batch of the rollout is on the disk as it will be trained on
    consumed   the trainer has finished its step with that batch
    committed  a checkpoint after that step is complete
    evaluated  an evaluation is complete
    resumed    a start of the run resumed after step `rollout`; `value`: the last rollout it already has

A step that was lost with its process is consumed again; `resumed` marks the steps that no longer count.
"""

import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from slime.record.schema import Reader, unusable
from slime.record.texts import json_text, storable
from slime.utils import codec

logger = logging.getLogger(__name__)

Event = Literal[
    "issued", "generated", "recalled", "scored", "kept", "dropped", "returned", "cut", "made",
    "consumed", "committed", "evaluated", "resumed", "called", "replied", "continued",
    "answered", "restarted",
]  # fmt: skip
Key = tuple[int, int, int, int | None]  # index, attempt, response tokens at the start, newest weights
# After these events the file is synced to the disk.
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


class Note(NamedTuple):
    """An event for the writer: the columns of `ledger`, and a function to call in the same transaction."""

    time: float
    event: Event
    rollout: int
    group_index: int | None = None
    sample_index: int | None = None
    attempt: int | None = None
    value: str | None = None
    also: Callable[[sqlite3.Connection], object] | None = None

    def row(self) -> tuple[object, ...]:
        return (*self[:-2], storable(self.value) if type(self.value) is str else self.value)


class Finished(NamedTuple):
    """An event for the writer: a sample was generated, and perhaps scored.

    The writer stores `payload`, from which a sample can be restored, only if its group is still undecided.
    Example: Finished(1.7e9, 3, 17, "8c1f", (68, 0, 0, 4), "completed", 1.0, b"...").
    """

    time: float
    rollout: int
    group_index: int | None
    settings: str  # digest of the settings with which it was generated
    key: Key
    status: str
    reward: Any  # None: not scored
    payload: bytes | None  # None: it cannot be stored, or must not be

    @property
    def event(self) -> Event:
        return "generated"


AnyNote = Note | Finished


@dataclass(frozen=True, slots=True)
class ForgetEntries:
    """Removes the stored samples of decided groups, after `keep` has written the rollout that has them."""

    groups: Sequence[int]
    keep: Callable[[sqlite3.Connection], object] | None = None

    def __call__(self, connection: sqlite3.Connection) -> None:
        if self.keep is not None:
            self.keep(connection)
        for table in ("ledger_finished", "ledger_episodes"):
            groups = [(group,) for group in self.groups]
            connection.executemany(f"DELETE FROM {table} WHERE group_index = ?", groups)


@dataclass(frozen=True, slots=True)
class KeepEpisode:
    """Stores an unfinished episode, in place of what its earlier turns stored."""

    key: tuple[int, int, int]  # of a sample, as in `Finished`
    group_index: int | None
    settings: str
    version: int | None
    payload: bytes | None  # None: it holds something that cannot be stored

    def __call__(self, connection: sqlite3.Connection) -> None:
        if self.payload is None:
            where = "sample_index = ? AND attempt = ? AND started = ?"
            connection.execute(f"DELETE FROM ledger_episodes WHERE {where}", self.key)
            return
        values = (*self.key, self.group_index, self.settings, self.version, self.payload)
        connection.execute("INSERT OR REPLACE INTO ledger_episodes VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def write_notes(connection: sqlite3.Connection, notes: Sequence[AnyNote], start: int) -> None:
    """Write events that waited together, in their order. `start`: number of the run's start."""
    rows: list[tuple[object, ...]] = []
    finished: list[Finished] = []
    forgets = [note.also for note in notes if isinstance(note, Note) and isinstance(note.also, ForgetEntries)]
    for note in notes:
        if isinstance(note, Finished):
            finished.append(note)
            continue
        if note.also is not None:  # it may remove samples that were stored before
            soon_forgotten = {group for forget in forgets for group in forget.groups}
            rows += _write_finished(connection, finished, soon_forgotten)
            finished = []
            note.also(connection)
            if isinstance(note.also, ForgetEntries):
                forgets.pop(0)
        rows.append(note.row())
    rows += _write_finished(connection, finished, set())
    connection.executemany(
        "INSERT INTO ledger (start, time, event, rollout, group_index, sample_index, attempt, value) "
        f"VALUES ({int(start)}, ?, ?, ?, ?, ?, ?, ?)",
        rows,
    )


def _write_finished(
    connection: sqlite3.Connection, finished: Sequence[Finished], forgotten: set[int]
) -> list[tuple[object, ...]]:
    """Store finished samples, except those of `forgotten` groups. Return the rows of their events."""
    groups: dict[tuple[int, int | None, int], list[Finished]] = {}
    for note in finished:
        groups.setdefault((note.rollout, note.group_index, note.key[1]), []).append(note)
    rows: list[tuple[object, ...]] = []
    for (rollout, group, attempt), notes in groups.items():
        about, time = (rollout, group, None, attempt), notes[-1].time
        ended: dict[str, list[int]] = {}
        for note in notes:
            ended.setdefault(note.status, []).append(note.key[0])
        rows.append((time, "generated", *about, json_text(ended)))
        rewards = {note.key[0]: note.reward for note in notes if note.reward is not None}
        if rewards:
            rows.append((time, "scored", *about, storable(json_text(rewards))))
    kept = [note for note in finished if note.payload is not None and note.group_index not in forgotten]
    connection.executemany(
        "INSERT INTO ledger_finished (group_index, settings, sample_index, attempt, started, version, "
        "payload) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(note.group_index, note.settings, *note.key, note.payload) for note in kept],
    )
    return rows


@dataclass(frozen=True, slots=True)
class FinishedEntry:
    """A finished sample, the siblings of a finished fan-out, or the sample of an unfinished episode."""

    version: int | None
    payload: bytes

    def load(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the fields of each sample, and whether it is a fan-out. ValueError: they are damaged."""
        value = codec.decode(self.payload)
        return value["samples"], value["fan_out"]


class LedgerReader(Reader):
    """Reads the ledger, for a run that resumes and for `slime ledger`."""

    def check_structure(self) -> None:
        """Raise a RecordError where tables and their indexes contradict each other."""
        rows = self._ask("PRAGMA integrity_check(1)")
        if rows != [("ok",)]:
            raise unusable(self._path, "read", sqlite3.DatabaseError(str(rows[0][0]).splitlines()[-1]))

    def meta(self, key: str) -> str | None:
        rows = self._ask("SELECT value FROM meta WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    def events(self) -> list[LedgerRow]:
        """Return all events, in the order they happened."""
        columns = "id, start, event, rollout, group_index, sample_index, attempt, value"
        return [LedgerRow(*row) for row in self._ask(f"SELECT {columns} FROM ledger ORDER BY id")]

    def rollouts_after(self, step: int, settings: str) -> dict[int, Any]:
        """Return the complete rollouts that follow a step without a gap, made with these settings."""
        rows = self._ask(
            "SELECT rollout_id, settings, payload FROM ledger_rollouts WHERE rollout_id > ? ORDER BY 1",
            (step,),
        )
        found: dict[int, Any] = {}
        for rollout_id, made_with, payload in rows:
            if rollout_id != step + 1 + len(found) or made_with != settings:
                break
            found[rollout_id] = codec.decode(payload)
        return found

    def rollout(self, rollout_id: int, settings: str) -> Any | None:
        """Return a complete rollout; None: it is not stored, or was made with other settings."""
        rows = self._ask(
            "SELECT payload FROM ledger_rollouts WHERE rollout_id = ? AND settings = ?",
            (rollout_id, settings),
        )
        return codec.decode(rows[0][0]) if rows else None

    def finished_entries(self, settings: str) -> dict[tuple[int, int, int], FinishedEntry]:
        """Return finished entries by sample index, attempt, and response tokens when generation started."""
        rows = self._ask(
            "SELECT sample_index, attempt, started, version, payload FROM ledger_finished "
            "WHERE settings = ? ORDER BY id",
            (settings,),
        )
        return {tuple(key): FinishedEntry(version, payload) for *key, version, payload in rows}

    def unfinished_episodes(self, settings: str) -> dict[tuple[int, int, int], FinishedEntry]:
        """Return episodes as their last recorded turns left them, by the keys of `finished_entries`."""
        rows = self._ask(
            "SELECT sample_index, attempt, started, version, payload FROM ledger_episodes WHERE settings = ?",
            (settings,),
        )
        return {tuple(key): FinishedEntry(version, payload) for *key, version, payload in rows}

    def is_evaluated(self, rollout_id: int) -> bool:
        return bool(
            self._ask("SELECT 1 FROM ledger WHERE event = 'evaluated' AND rollout = ?", (rollout_id,))
        )


def keep_rollout(rollout_id: int, settings: str, value: object, connection: sqlite3.Connection) -> None:
    """Store a whole rollout, with which a killed run resumes."""
    payload = encode_or_skip(value, f"rollout {rollout_id}")
    if payload is not None:
        values = (rollout_id, settings, payload)
        connection.execute("INSERT OR REPLACE INTO ledger_rollouts VALUES (?, ?, ?)", values)


def encode_or_skip(value: object, name: str) -> bytes | None:
    """Encode a value; None where it contains something that cannot be stored."""
    try:
        return codec.encode(value)
    except codec.ForeignValue as error:
        logger.info("%s contains %s, so it is not stored; after a crash it is generated again", name, error)
        return None


def forget_rollouts(condition: str, step: int, connection: sqlite3.Connection) -> None:
    """Remove rollouts that a checkpoint covers ("<="), or that a run did not resume with (">")."""
    connection.execute(f"DELETE FROM ledger_rollouts WHERE rollout_id {condition} ?", (step,))
