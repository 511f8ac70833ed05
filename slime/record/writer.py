"""Writes a run's record in one thread, in the order in which entries are submitted.

The thread collects entries for `GATHER_S` and then writes them together; a killed process loses only those.
Finished samples whose batch is complete by then are not stored separately. A write that fails (a full disk)
is retried in smaller parts; the run continues, and the file counts what could not be written.
"""

import asyncio
import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.record.ledger_rows import MILESTONES, AnyNote, Finished, Note, write_notes
from slime.record.samples import Entry, checksum, reward_number, write_groups
from slime.record.schema import create_or_open, forget_groups
from slime.utils.machine.own_command import as_typed

logger = logging.getLogger(__name__)

GATHER_S = 0.1
_MAX_WAITING = 4  # rollouts
_LOCKED_S = 600.0  # how long another process may lock the file before the queued entries are dropped
_KEEP_SHARE = 0.9  # share of the limit, after rows were removed
_FREE_BYTES = 4 << 20  # unused space in the file before some is returned to the file system:
_PAGES_BACK = 20_000


@dataclass(frozen=True, slots=True)
class _Rollout:
    kind: str
    rollout_id: int
    entries: tuple[Entry, ...]
    version: str | None
    reward_key: str | None
    time: float


@dataclass(frozen=True, slots=True)
class _Work:
    """Something else to write. `what` names it in the log if that fails."""

    what: str
    write: Callable[[sqlite3.Connection], object]


# A function is called once all earlier entries are written.
_Item = _Rollout | _Work | AnyNote | Callable[[], object]
_Part = _Rollout | _Work | list[AnyNote]  # written as a whole, or not at all


class RecordWriter:
    """Writes `record.db` on a thread of its own.

    `max_bytes`: about how large the file may grow; the samples of the oldest rollouts are removed first.
    `start`: number of the run's start. `keeps_uncommitted`: samples of steps that no checkpoint covers stay,
    whatever their size. The file is synced to the disk at milestones of the run.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        max_bytes: int,
        *,
        start: int = 1,
        keeps_uncommitted: bool = False,
    ):
        self._path, self._max_bytes = path, max_bytes
        self._start = start
        self._committed: int | None = -1 if keeps_uncommitted else None
        self._connection = create_or_open(path, run_id)
        self._is_durable = False  # set by `create_or_open`
        self._inode, self._is_gone = path.stat().st_ino, False
        self._waiting: deque[_Item] = deque()
        self._rollouts_waiting = 0
        self._news = threading.Condition()
        self._is_idle = False  # the thread waits for entries, and was not woken
        # What could not be written, over all starts of the run.
        known = dict(self._connection.execute("SELECT key, value FROM meta").fetchall())
        self._missed = {key: int(known.get(key, 0)) for key in ("missed_rollouts", "missed_events")}
        self._missed_steps = set(json.loads(known.get("missed_steps", "[]")))  # without their samples
        self._locked_since: float | None = None  # by another process
        self._logged: set[type] = set()  # kinds of parts of which one could not be written
        self._closed = self._in_a_hurry = False  # the latter: write now, without gathering
        self._thread = threading.Thread(target=self._write_all, name="record", daemon=True)
        self._thread.start()

    def add(
        self,
        kind: str,
        rollout_id: int,
        entries: Sequence[Entry],
        *,
        version: str | None = None,
        reward_key: str | None = None,
    ) -> None:
        """Hand over a rollout ("train") or an evaluation ("eval"); it replaces one with the same number.

        The samples are read soon, on another thread: their tokens and texts must not be changed any more.
        """
        self._hand_over(_Rollout(kind, rollout_id, tuple(entries), version, reward_key, time.time()))

    def submit(self, what: str, write: Callable[[sqlite3.Connection], object]) -> None:
        """Hand over anything else: the writer's thread calls `write` as one transaction."""
        self._hand_over(_Work(what, write))

    def _hand_over(self, item: _Rollout | _Work) -> None:
        with self._news:
            if isinstance(item, _Rollout):  # only these are large
                self._news.wait_for(lambda: self._rollouts_waiting < _MAX_WAITING)
                self._rollouts_waiting += 1
            self._waiting.append(item)
            self._news.notify_all()

    def note(self, *notes: AnyNote) -> None:
        """Hand over events of the ledger. Never waits: the event loop calls it."""
        self._waiting.extend(notes)  # without the lock: the writer pops from the other end
        if self._is_idle:
            with self._news:
                self._news.notify_all()

    def flush(self) -> None:
        """Return when everything handed over so far is written, or was logged as missing."""
        done = threading.Event()
        if not self._call_when_written(done.set):
            return
        while not done.wait(1.0) and self._thread.is_alive():
            pass
        self._warn_if_gone()

    async def written(self) -> None:
        """Return like `flush`, without blocking the event loop."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        if self._call_when_written(lambda: loop.call_soon_threadsafe(done.set)):
            await done.wait()

    def _call_when_written(self, function: Callable[[], object]) -> bool:
        """Write now, then call the function; False: the writer is closed."""
        with self._news:
            if self._closed:
                return False
            self._in_a_hurry = True
            self._waiting.append(function)
            self._news.notify_all()
        return True

    def close(self) -> None:
        """Write what was handed over, and close the file. Safe to call twice."""
        if not self._closed:
            with self._news:
                self._closed = True
                self._news.notify_all()
            self._thread.join()
            with contextlib.suppress(sqlite3.Error):  # SQLite does it by itself only if there is no reader
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.close()

    def _warn_if_gone(self) -> None:
        """Warn if the file was removed or replaced: SQLite keeps writing to the old one, which gets lost."""
        here = self._path.stat().st_ino if self._path.exists() else None
        if here != self._inode and not self._is_gone:
            self._is_gone = True
            logger.error(
                "%s was removed or replaced while the run writes to it: what is recorded from now on is lost "
                "when the run ends. Stop the run and start it again: it resumes from its last checkpoint.",
                self._path,
            )

    def _write_all(self) -> None:
        while items := self._next_items():
            notes = [item for item in items if isinstance(item, (Note, Finished))]
            # Events have tables of their own, so they may be written before the rollouts between them.
            parts: list[_Part] = [notes] if notes else []
            parts += [item for item in items if isinstance(item, (_Rollout, _Work))]
            if parts:
                self._write_parts(parts)
            for item in items:
                if not isinstance(item, (Note, Finished, _Rollout, _Work)):
                    with contextlib.suppress(RuntimeError):  # an event loop that has ended
                        item()
            items, notes, parts = [], [], []  # samples without other references are freed now

    def _next_items(self) -> list[_Item]:
        """Return everything that waits; an empty list: the writer is closed."""
        with self._news:
            self._is_idle = True
            self._news.wait_for(lambda: self._waiting or self._closed)
            self._is_idle = False
            self._news.wait_for(self._is_due, GATHER_S)
            items = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self._rollouts_waiting -= sum(isinstance(item, _Rollout) for item in items)
            self._in_a_hurry = False
            self._news.notify_all()
        return items

    def _is_due(self) -> bool:
        return self._closed or self._in_a_hurry or self._rollouts_waiting >= _MAX_WAITING

    def _write_parts(self, parts: list[_Part]) -> None:
        try:
            self._set_durability(parts)
            with self._connection:
                for part in parts:
                    if isinstance(part, _Rollout):
                        self._write(part)
                    elif isinstance(part, _Work):
                        part.write(self._connection)
                    else:
                        self._write_notes(part)
        except Exception as error:  # a sample may contain anything: this thread must survive
            self._connection.rollback()
            if self._waits_for_lock(error):
                self._write_parts(parts)
                return
            # A part or event that cannot be written affects no other; otherwise the disk is the cause.
            smaller, first = parts if len(parts) > 1 else [], parts[0]
            if not smaller and isinstance(first, list) and not isinstance(error, sqlite3.OperationalError):
                smaller = [[note] for note in first] if len(first) > 1 else []
            if not smaller:
                self._log_missed(first, error)
            for part in smaller:
                self._write_parts([part])
            return
        self._locked_since = None
        if any(isinstance(part, _Rollout) for part in parts):
            try:
                self._prune()
            except sqlite3.Error:  # what was written stays written; the next rollout prunes again
                self._connection.rollback()

    def _waits_for_lock(self, error: Exception) -> bool:
        """Return whether to retry, because another process (a backup, a shell) has locked the file."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
            return False
        if self._locked_since is None:
            self._locked_since = time.monotonic()
            logger.warning(
                "%s is locked by another process: the record waits for it, up to %d s", self._path, _LOCKED_S
            )
        return not self._closed and time.monotonic() - self._locked_since < _LOCKED_S

    def _set_durability(self, parts: list[_Part]) -> None:
        notes = parts[0] if isinstance(parts[0], list) else []
        durable = any(note.event in MILESTONES for note in notes)
        if durable != self._is_durable:
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._is_durable = durable

    def _log_missed(self, part: _Part, error: Exception) -> None:
        is_first = type(part) not in self._logged
        self._logged.add(type(part))
        if isinstance(part, _Rollout):
            self._missed["missed_rollouts"] += 1
            self._missed_steps |= {part.rollout_id} if part.kind == "train" else set()
            what = f"the samples of {part.kind} {part.rollout_id}: not recorded"
        elif isinstance(part, _Work):
            what = f"{part.what}: not recorded"
        else:
            self._missed["missed_events"] += len(part)
            what = f"{len(part)} events of rollout {part[-1].rollout}: not recorded, so that after a crash "
            what += f"more is generated again than needed; `{as_typed('ledger', 'audit')}` proves nothing"
        with contextlib.suppress(sqlite3.Error), self._connection:  # these few bytes may still fit
            self._write_missed()
        if is_first:
            logger.warning("%s cannot be written (%s): %s; the run continues.", self._path, error, what)

    def _write_notes(self, notes: Sequence[AnyNote]) -> None:
        write_notes(self._connection, notes, self._start)
        self._write_missed()
        if self._committed is not None:
            done = [note.rollout for note in notes if note.event in ("committed", "resumed")]
            self._committed = done[-1] if done else self._committed

    def _write(self, rollout: _Rollout) -> None:
        connection, entries = self._connection, rollout.entries
        key = (rollout.kind, rollout.rollout_id)
        query = "SELECT id FROM rollouts WHERE kind = ? AND rollout_id = ?"
        if (before := connection.execute(query, key).fetchone()) is not None:  # made again
            forget_groups(connection, before[0])
            connection.execute("DELETE FROM rollouts WHERE id = ?", before)
        rewards = [[reward_number(s, rollout.reward_key) for s in entry.samples] for entry in entries]
        known = [reward for group in rewards for reward in group if reward is not None]
        row = connection.execute(
            "INSERT INTO rollouts (kind, rollout_id, time, version, num_groups, num_samples, mean_reward)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *key,
                rollout.time,
                rollout.version,
                len(entries),
                sum(map(len, rewards)),
                sum(known) / len(known) if known else None,
            ),
        ).lastrowid
        assert row is not None
        write_groups(connection, row, entries, rewards)
        values = (checksum(connection, row), row)
        connection.execute("UPDATE rollouts SET checksum = ? WHERE id = ?", values)
        self._write_missed()

    def _write_missed(self) -> None:
        """Store the counts as part of the caller's transaction."""
        for key, value in {**self._missed, "missed_steps": sorted(self._missed_steps)}.items():
            if value:
                self._connection.execute(
                    "INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value))
                )

    def _prune(self) -> None:
        """Remove groups and samples of the oldest rollouts until the file fits. The newest one stays."""
        while self._used_bytes() > self._max_bytes and self._prune_oldest():
            if self._used_bytes() < self._max_bytes * _KEEP_SHARE:
                break
        if (
            self._pragma("freelist_count") * self._pragma("page_size") > _FREE_BYTES
        ):  # the free space is soon used again
            self._connection.execute(f"PRAGMA incremental_vacuum({_PAGES_BACK})").fetchall()

    def _prune_oldest(self) -> bool:
        """Prune the rollout that was written first, and return whether there was one.

        The order of writing counts: clocks may go backwards.
        """
        oldest = self._connection.execute(
            "SELECT id, kind, rollout_id FROM rollouts WHERE NOT pruned ORDER BY id LIMIT 2"
        ).fetchall()
        if len(oldest) < 2:
            return False
        row, kind, rollout_id = oldest[0]
        if kind == "train" and self._committed is not None and rollout_id > self._committed:
            return False
        with self._connection as connection:
            forget_groups(connection, row)
            connection.execute(  # spans of single samples
                "DELETE FROM spans WHERE rollout_id = ? AND (lane LIKE 'engine%' OR lane = 'reward')",
                (rollout_id,),
            )
            connection.execute("UPDATE rollouts SET pruned = 1 WHERE id = ?", (row,))
            if kind == "train":
                connection.execute(
                    "DELETE FROM ledger WHERE rollout = ? AND event IN "
                    "('generated', 'recalled', 'called', 'replied')",
                    (rollout_id,),
                )
        return True

    def _used_bytes(self) -> int:
        return (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])
