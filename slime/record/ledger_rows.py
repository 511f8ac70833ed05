"""The ledger of a run: every event of its groups, samples and steps, in the order they happened.

    issued     a group was handed out: `value` "new" (of the dataset), "buffer", or "own" (of a user's source)
    generated  samples of a group are finished (tokens, log-probs, versions are in `samples`); `value`: which
               ended in which way, by their indices
    recalled   a finished sample was taken from the ledger after a crash instead of generated again
    scored     samples got rewards; `value`: each one's by its index, or those of a group in their order
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

import json
import logging
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slime.record import plain_bytes
from slime.record.any_json import any_json, plain_or_text, storable
from slime.record.rows import insert_columns
from slime.record.schema import READ_ERRORS, open_for_reading, unusable
from slime.record.tables import pack_columns, unpack_table

logger = logging.getLogger(__name__)

Event = Literal[
    "issued", "generated", "recalled", "scored", "kept", "dropped", "returned", "cut", "made",
    "consumed", "committed", "evaluated", "resumed",
]  # fmt: skip
_INTS, _FLOATS = frozenset({int}), frozenset({float})
_as_json = json.JSONEncoder(default=plain_or_text).encode  # `json.dumps` makes one for each call
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


class Note(NamedTuple):
    """What a writer adds: an event, by the columns of `ledger`, and what else the same transaction does."""

    time: float
    event: Event
    rollout: int
    group_index: int | None = None
    sample_index: int | None = None
    attempt: int | None = None
    value: str | None = None
    also: Callable[[sqlite3.Connection], object] | None = None

    def row(self) -> tuple[object, ...]:
        value = self.value
        if type(value) is str and not value.isascii():
            value = storable(value)
        return (*self[:-2], value)


Columns = dict[str, list[Any]]  # the values of some samples by the names of fields


class Kept(NamedTuple):
    """What finished samples are made again from: of several samples, or of each sibling of a fan-out.

    `keys`: index, attempt, response tokens at the start and newest weights of each; a fan-out has one.
    Example: Kept([(68, 0, 0, 4)], [{"index": [68], "tokens": [[5, 6]]}]).
    """

    keys: list[tuple[int, int, int, int | None]]
    columns: list[Columns]
    is_fan_out: bool = False


class Finished(NamedTuple):
    """Samples of one group were finished together: that they were generated and scored, and all of each.

    `kept` gives them as they were at that time; where the rollout is complete before the writer's turn comes,
    nobody asks for it. Example: Finished(1.7e9, 3, 17, 0, "8c1f", {"completed": [68]}, {68: 1.0}, keep).
    """

    time: float
    rollout: int
    group_index: int | None
    attempt: int
    settings: str  # digest of the settings they were made with
    statuses: dict[str, list[int]]  # indices of the samples that ended in each way
    rewards: dict[int, object]  # of those that are scored
    kept: Callable[[], Kept] | None

    @property
    def event(self) -> Event:
        return "generated"


class JustFinished(NamedTuple):
    """The same of samples as they were seen at that time; the writer's thread does the rest.

    `sort` makes it of time, rollout and samples.
    """

    time: float
    rollout: int
    samples: Any
    sort: Callable[[float, int, Any], list[Finished]]

    @property
    def event(self) -> Event:
        return "generated"


AnyNote = Note | Finished | JustFinished


@dataclass(frozen=True, slots=True)
class ForgetEntries:
    """These groups are decided: what became of them is in the rollout that `keep` writes, or in a cursor."""

    groups: Sequence[int]
    keep: Callable[[sqlite3.Connection], object] | None = None

    def __call__(self, connection: sqlite3.Connection) -> None:
        if self.keep is not None:
            self.keep(connection)
        connection.executemany(
            "DELETE FROM ledger_finished WHERE group_index = ?", [(group,) for group in self.groups]
        )


def write_notes(connection: sqlite3.Connection, notes: Sequence[AnyNote], start: int) -> None:
    """Events that waited together, with what belongs to them; `start`: number of the run's start."""
    rows: list[tuple[object, ...]] = []
    finished: list[Finished] = []
    forgets = [note.also for note in notes if isinstance(note, Note) and isinstance(note.also, ForgetEntries)]
    for note in notes:
        if isinstance(note, JustFinished):
            finished += note.sort(note.time, note.rollout, note.samples)
            continue
        if isinstance(note, Finished):
            finished.append(note)
            continue
        if note.also is None:
            rows.append(note.row())
            continue
        # In their order: this may remove what was put there before.
        rows += _write_finished(connection, finished, _soon_forgotten(forgets))
        finished = []
        rows.append(note.row())
        note.also(connection)
        if isinstance(note.also, ForgetEntries):
            forgets.pop(0)
    rows += _write_finished(connection, finished, frozenset())
    if rows:
        columns = dict(zip(Note._fields[:-1], zip(*rows, strict=True), strict=True))
        insert_columns(connection, "ledger", columns, {"start": start})


def _soon_forgotten(forgets: list[ForgetEntries]) -> frozenset[int]:
    """Groups of which this very transaction removes what is kept: it need not be packed."""
    return frozenset(group for forget in forgets for group in forget.groups)


def _write_finished(
    connection: sqlite3.Connection, finished: Iterable[Finished], forgotten: frozenset[int]
) -> list[tuple[object, ...]]:
    """Keeps finished samples, but for those of `forgotten` groups; the rows of their events."""
    groups: dict[tuple[int, int | None, int], list[Finished]] = {}
    for note in finished:
        groups.setdefault((note.rollout, note.group_index, note.attempt), []).append(note)
    rows: list[tuple[object, ...]] = []
    kept: list[tuple[object, ...]] = []
    for (rollout, group, attempt), notes in groups.items():
        about, time = (rollout, group, None, attempt), notes[-1].time
        ended, rewards = notes[0].statuses, notes[0].rewards
        if len(notes) > 1:
            ended = {}
            for note in notes:
                for status, indices in note.statuses.items():
                    ended[status] = ended.get(status, []) + indices
            rewards = {index: reward for note in notes for index, reward in note.rewards.items()}
        rows.append((time, "generated", *about, _statuses_text(ended)))
        if rewards:
            rows.append((time, "scored", *about, _rewards_text(rewards)))
        if group not in forgotten:
            kept += _kept_rows(notes)
    if kept:
        connection.executemany(
            "INSERT INTO ledger_finished (group_index, settings, keys, payload) VALUES (?, ?, ?, ?)", kept
        )
    return rows


def _statuses_text(ended: dict[str, list[int]]) -> str:
    """JSON, which Python writes whole numbers as: to begin its encoder takes longer than these do."""
    if all(_INTS.issuperset(map(type, indices)) for indices in ended.values()):
        return "{" + ", ".join([f'"{status}": {indices}' for status, indices in ended.items()]) + "}"
    return _as_json(ended)


def _rewards_text(rewards: dict[int, object]) -> str:
    """The same of numbers by indices, which Python writes without quotes."""
    if _FLOATS.issuperset(map(type, rewards.values())):
        text = str(rewards)
        if "n" not in text:  # of nan, inf, or of numbers of numpy's
            return '{"' + text[1:].replace(": ", '": ').replace(", ", ', "')
    return any_json(_as_json, rewards)


def _kept_rows(notes: list[Finished]) -> list[tuple[object, ...]]:
    """Rows of ledger_finished: samples that were finished together in one piece."""
    rows: list[tuple[object, ...]] = []
    for note in notes:
        kept = note.kept() if note.kept is not None else None
        for piece, payload in _packed_pieces(kept) if kept is not None and kept.keys else ():
            rows.append((note.group_index, note.settings, _as_json(piece.keys), payload))
    return rows


def _packed_pieces(kept: Kept) -> list[tuple[Kept, bytes]]:
    """Together where they are of one kind; where one holds something foreign, the others need not suffer."""
    if len(kept.keys) > 1:
        [columns] = kept.columns
        payload = pack_columns(columns, len(kept.keys))
        if payload is None:
            singles = [
                {n: values[at : at + 1] for n, values in columns.items()} for at in range(len(kept.keys))
            ]
            pieces = [Kept([key], [single]) for key, single in zip(kept.keys, singles, strict=True)]
            return [found for piece in pieces for found in _packed_pieces(piece)]
    else:
        samples = [{name: value for name, [value] in columns.items()} for columns in kept.columns]
        payload = _packed({"fan_out": kept.is_fan_out, "samples": samples}, f"sample {kept.keys[0][0]}")
    return [] if payload is None else [(kept, payload)]


@dataclass(frozen=True, slots=True)
class FinishedEntry:
    """A sample (or the siblings of a fan-out) that was finished when the run ended, by what it began from."""

    version: int | None
    payload: bytes
    place: int | None  # in a table of several; None: it is by itself

    @property
    def is_fan_out(self) -> bool:
        return self.place is None and bool(plain_bytes.loads(self.payload)["fan_out"])

    def samples(self) -> list[dict[str, Any]]:
        if self.place is not None:
            return [unpack_table(self.payload)[self.place]]
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
            raise unusable(self._path, "read", error) from error
        except READ_ERRORS as error:
            raise unusable(self._path, "read", error) from error

    def check_structure(self) -> None:
        """A RecordError where tables and their indexes do not fit each other."""
        rows = self._ask("PRAGMA integrity_check(1)")
        if rows != [("ok",)]:
            raise unusable(self._path, "read", sqlite3.DatabaseError(str(rows[0][0]).splitlines()[-1]))

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
            "SELECT keys, payload FROM ledger_finished WHERE settings = ? ORDER BY id", (settings,)
        )
        try:
            return {
                (index, attempt, started): FinishedEntry(version, payload, place if len(keys) > 1 else None)
                for keys, payload in ((json.loads(text), payload) for text, payload in rows)
                for place, (index, attempt, started, version) in enumerate(keys)
            }
        except (ValueError, TypeError) as error:
            raise unusable(self._path, "read", error) from error

    def is_evaluated(self, rollout_id: int) -> bool:
        rows = self._ask(
            "SELECT 1 FROM ledger WHERE event = 'evaluated' AND rollout = ? LIMIT 1", (rollout_id,)
        )
        return bool(rows)


def keep_rollout(rollout_id: int, settings: str, value: object) -> Callable[[sqlite3.Connection], object]:
    """Puts a whole rollout where a run that goes on finds it."""

    def keep(connection: sqlite3.Connection) -> None:
        payload = _packed(value, f"rollout {rollout_id}")
        if payload is not None:
            values = (rollout_id, settings, payload)
            connection.execute("INSERT OR REPLACE INTO ledger_rollouts VALUES (?, ?, ?)", values)

    return keep


def _packed(value: object, name: str) -> bytes | None:
    """The bytes of a value; None where it holds something that no file can, so that it is made again."""
    try:
        return plain_bytes.dumps(value)
    except (plain_bytes.ForeignValue, RecursionError) as error:
        what = "what holds itself" if isinstance(error, RecursionError) else error
        logger.info("%s holds %s: it is not kept, and made again after a crash", name, what)
        return None


def forget_rollouts(*, up_to: int | None = None, after: int | None = None) -> Callable[..., object]:
    """Those that a checkpoint covers, or those that a run did not go on with."""

    def forget(connection: sqlite3.Connection) -> None:
        if up_to is not None:
            connection.execute("DELETE FROM ledger_rollouts WHERE rollout_id <= ?", (up_to,))
        if after is not None:
            connection.execute("DELETE FROM ledger_rollouts WHERE rollout_id > ?", (after,))

    return forget
