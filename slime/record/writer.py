"""The one writer of a run's record: a thread writes what is handed over, in that order.

What waits together is one transaction: transactions cost more than most of what is in them. The first of it
waits 50 ms for the others, or up to a second where writing takes long; a batch that is complete is written as
soon as the trainer has it, and the finished samples it is made of, if they were still waiting, not at all.
Batches that come several a second are written together, as many as a second has. The run waits for the disk
only when several rollouts are waiting already. A write that fails (a full disk) is tried once more by its
parts, and events one by one where it is not the disk; the first of each kind that fails is told, and the run
goes on; how many could not be written is noted in the file once it can be again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.record.entries import Entry
from slime.record.ledger_rows import (
    MILESTONES,
    AnyNote,
    Finished,
    ForgetEntries,
    JustFinished,
    Note,
    write_notes,
)
from slime.record.missed import Missed
from slime.record.sample_rows import Answers, write_answers
from slime.record.schema import create_or_open, forget_groups
from slime.utils.machine.own_command import as_typed

logger = logging.getLogger(__name__)

_MAX_WAITING = 4  # rollouts
_LOCKED_S = 600.0  # how long another process may hold the file before what waits is given up
_KEEP_SHARE = 0.9  # of the limit, after rows were removed
_PAGES_BACK = 20_000  # returned to the file system at a time, where more than this is free:
_FREE_BYTES = 4 << 20


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
    """Something else to write. `what`: for the log, where it fails."""

    what: str
    write: Callable[[sqlite3.Connection], object]


# An event is set when all that came before it is written.
_Item = _Rollout | _Work | AnyNote | threading.Event
_Part = _Rollout | _Work | list[AnyNote]  # what is written, or fails, as one


# How long the first of several waits for the others; a killed process loses as much. Where a transaction
# takes long, as with hundreds of samples a second, more are gathered: writing is a small part of the time.
MIN_GATHER_S, MAX_GATHER_S = 0.05, 1.0
_HANDED_ON_S = 0.03  # in which a complete batch of small samples is with the trainer
_GATHERED_PER_WRITING = 20.0
_RECENT = 8  # transactions, of which the longest counts: small ones come between the rollouts


class RecordWriter:
    """`max_bytes`: about how large the file may grow; the samples of the oldest rollouts go first.

    `sync`: when the disk is asked to have all of it: never (a killed process loses nothing all the same, a
    machine without power does), at milestones of the run, or after every transaction. `start`: number of the
    run's start. `keeps_uncommitted`: samples of steps that no checkpoint covers stay, whatever their size.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        max_bytes: int,
        *,
        sync: str = "step",
        start: int = 1,
        max_days: float | None = None,
        keeps_uncommitted: bool = False,
    ):
        self._path, self._max_bytes, self._max_days = path, max_bytes, max_days
        self._sync, self._start = sync, start
        self._committed: int | None = -1 if keeps_uncommitted else None
        self._connection = create_or_open(path, run_id)
        self._is_durable = False  # `create_or_open` leaves it so
        self._inode, self._is_gone = path.stat().st_ino, False
        self._waiting: deque[_Item] = deque()
        self._rollouts_waiting = 0
        self._news = threading.Condition()
        self._is_idle = False  # the thread waits for something to do, and nobody has told it of any
        self._gather_s = MIN_GATHER_S
        self._took: deque[float] = deque(maxlen=_RECENT)  # seconds of the last transactions
        self._missed = Missed(self._connection)
        self._locked_since: float | None = None  # by another process
        self._told: set[type] = set()  # kinds of parts of which one could not be written
        self._closed = self._in_a_hurry = False  # the latter: what waits is written now
        self._is_complete = False  # a batch is: what waits is written soon
        self._num_complete = 0  # of what waits: up to the last batch that is complete
        self._last_complete, self._complete_every_s = -math.inf, math.inf
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
        """Hand over a rollout ("train") or an evaluation ("eval"); one of the same number takes its place.

        The samples are read soon, on another thread: their tokens and texts must not be changed any more.
        """
        self._hand_over(_Rollout(kind, rollout_id, tuple(entries), version, reward_key, time.time()))

    def submit(self, what: str, write: Callable[[sqlite3.Connection], object]) -> None:
        """Hand over anything else: `write` is called on the writer's thread, as one transaction."""
        self._hand_over(_Work(what, write))

    def _hand_over(self, item: _Rollout | _Work) -> None:
        with self._news:
            if isinstance(item, _Rollout):  # what is large
                self._news.wait_for(lambda: self._rollouts_waiting < _MAX_WAITING)
                self._rollouts_waiting += 1
            self._waiting.append(item)
            if self._is_idle or self._is_due():
                self._news.notify_all()

    def note(self, *notes: AnyNote) -> None:
        """Hand over events of the ledger. Never waits: the event loop calls it."""
        # Without the lock, which would take longer than the rest: the writer takes from the other end.
        self._waiting.extend(notes)
        last = notes[-1]
        is_complete = isinstance(last, Note) and isinstance(last.also, ForgetEntries)
        if self._is_idle or is_complete:  # to wake it for each would cost more than to write it
            with self._news:
                if is_complete:
                    now = time.monotonic()
                    self._complete_every_s, self._last_complete = now - self._last_complete, now
                    self._is_complete, self._num_complete = True, len(self._waiting)
                self._is_idle = False
                self._news.notify_all()

    def flush(self) -> None:
        """Returns when all that was handed over until now is written, or was told to be missing."""
        done = threading.Event()
        with self._news:
            if self._closed:
                return
            self._in_a_hurry = True
            self._waiting.append(done)
            self._news.notify_all()
        while not done.wait(1.0) and self._thread.is_alive():
            pass
        self._tell_if_gone()

    def close(self) -> None:
        """Writes what was handed over; safe to call twice."""
        if not self._closed:
            with self._news:
                self._closed = True
                self._news.notify_all()
            self._thread.join()
            with contextlib.suppress(sqlite3.Error):  # by itself it is done only if nobody reads just now
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.close()

    def _tell_if_gone(self) -> None:
        """SQLite writes on into a file that was removed or replaced, which is lost with the process."""
        here = self._path.stat().st_ino if self._path.exists() else None
        if here != self._inode and not self._is_gone:
            self._is_gone = True
            logger.error(
                "%s was removed or replaced while the run writes to it: what is recorded from now on is lost "
                "when the run ends. Stop it and start it again: it goes on from its last checkpoint.",
                self._path,
            )

    def _write_all(self) -> None:
        while items := self._next_items():
            notes = [item for item in items if isinstance(item, (Note, Finished, JustFinished))]
            # Events lie in tables of their own: they may be written before what came between them.
            parts: list[_Part] = [notes] if notes else []
            parts += [item for item in items if isinstance(item, (_Rollout, _Work))]
            waiting = [item for item in items if isinstance(item, threading.Event)]
            items.clear()
            if parts:
                began = time.perf_counter()
                self._write_parts(parts)
                self._took.append(time.perf_counter() - began)
                self._gather_s = min(max(_GATHERED_PER_WRITING * max(self._took), MIN_GATHER_S), MAX_GATHER_S)
            notes.clear()
            self._let_go(parts)
            for event in waiting:
                event.set()

    def _let_go(self, parts: list[_Part]) -> None:
        """Whoever has the samples of a rollout last spends the time to free them: often this thread."""
        parts.clear()

    def _next_items(self) -> list[_Item]:
        """All that waits together; none: nothing will come any more."""
        with self._news:
            self._is_idle = True
            self._news.wait_for(lambda: self._waiting or self._closed)
            self._is_idle = False
            latest = time.monotonic() + MAX_GATHER_S
            self._news.wait_for(lambda: self._is_due() or self._is_complete, self._gather_s)
            while self._is_complete and not self._is_due() and self._awaits_another(latest):
                self._is_complete = False
                self._news.wait_for(
                    lambda: self._is_due() or self._is_complete, max(0.0, latest - time.monotonic())
                )
            if self._is_complete:  # whoever hands it on would share the interpreter with this thread
                self._news.wait_for(self._is_due, _HANDED_ON_S)
            # The samples of a batch that is not complete yet need not be packed if it soon is.
            is_early = self._num_complete and not self._is_complete and not self._is_due()
            number = self._num_complete if is_early else len(self._waiting)
            items = [self._waiting.popleft() for _ in range(number)]  # others may be added meanwhile
            self._rollouts_waiting -= sum([isinstance(item, _Rollout) for item in items])
            self._num_complete, self._in_a_hurry, self._is_complete = 0, False, False
            self._news.notify_all()
        return items

    def _awaits_another(self, latest: float) -> bool:
        """Whether another batch will be complete by then, if they go on to come as the last ones did."""
        soon = self._last_complete + self._complete_every_s < latest
        return soon and self._rollouts_waiting < _MAX_WAITING - 1

    def _is_due(self) -> bool:
        """Whether what waits is to be written now."""
        return self._closed or self._in_a_hurry or self._rollouts_waiting >= _MAX_WAITING

    def _write_parts(self, parts: list[_Part]) -> None:
        try:
            self._set_durability(parts)
            with self._connection:
                for part in parts:
                    self._write_part(part)
        except Exception as error:  # also of what a user's function put into a sample: this thread goes on
            self._connection.rollback()
            if self._waits_for_lock(error):
                self._write_parts(parts)
                return
            smaller = parts if len(parts) > 1 else _single_events(parts[0], error)
            if not smaller:
                self._tell_missed(parts[0], error)
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
        """Whether to try again: another process (a backup, a shell) holds the file, and will let go of it."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
            return False
        if self._locked_since is None:
            self._locked_since = time.monotonic()
            logger.warning(
                "%s is locked by another process: the ledger waits for it, up to %d s", self._path, _LOCKED_S
            )
        return not self._closed and time.monotonic() - self._locked_since < _LOCKED_S

    def _write_part(self, part: _Part) -> None:
        """Writes one part; the caller has begun the transaction."""
        if isinstance(part, _Rollout):
            self._write(part)
        elif isinstance(part, _Work):
            part.write(self._connection)
        else:
            self._write_notes(part)

    def _set_durability(self, parts: list[_Part]) -> None:
        notes = parts[0] if isinstance(parts[0], list) else []
        durable = self._sync == "always" or (
            self._sync == "step" and any(note.event in MILESTONES for note in notes)
        )
        if durable != self._is_durable:
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._is_durable = durable

    def _tell_missed(self, part: _Part, error: Exception) -> None:
        is_first = type(part) not in self._told
        self._told.add(type(part))
        if isinstance(part, _Rollout):
            self._missed.rollouts += 1
            self._missed.steps |= {part.rollout_id} if part.kind == "train" else set()
            what = f"the samples of {part.kind} {part.rollout_id}: not recorded"
        elif isinstance(part, _Work):
            what = f"{part.what}: not recorded"
        else:
            self._missed.events += len(part)
            what = f"{len(part)} events of rollout {part[-1].rollout}: not recorded, so that after a crash "
            what += f"more is made again than needed, and `{as_typed('ledger', 'audit')}` can prove nothing"
        with contextlib.suppress(sqlite3.Error), self._connection:  # so few bytes may still fit
            self._missed.note(self._connection)
        if is_first:
            logger.warning("%s cannot be written (%s): %s; the run goes on.", self._path, error, what)

    def _write_notes(self, notes: Sequence[AnyNote]) -> None:
        write_notes(self._connection, notes, self._start)
        self._missed.note(self._connection)
        if self._committed is not None:
            done = [note.rollout for note in notes if note.event in ("committed", "resumed")]
            self._committed = done[-1] if done else self._committed

    def _write(self, rollout: _Rollout) -> None:
        connection = self._connection
        answers = Answers(rollout.entries, rollout.reward_key)
        # With its groups and samples: a rollout that is made again after a resume replaces the first.
        key = (rollout.kind, rollout.rollout_id)
        before = connection.execute(
            "SELECT id FROM rollouts WHERE kind = ? AND rollout_id = ?", key
        ).fetchone()
        if before is not None:
            forget_groups(connection, before[0])
            connection.execute("DELETE FROM rollouts WHERE id = ?", before)
        row = connection.execute(
            "INSERT INTO rollouts (kind, rollout_id, time, version, num_groups, num_samples, mean_reward)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *key,
                rollout.time,
                rollout.version,
                len(rollout.entries),
                len(answers.samples),
                answers.mean_reward,
            ),
        ).lastrowid
        assert row is not None
        checksum = write_answers(connection, row, answers)
        connection.execute("UPDATE rollouts SET checksum = ? WHERE id = ?", (checksum, row))
        self._missed.note(connection)

    def _prune(self) -> None:
        """Remove groups and samples of the oldest rollouts until the file fits; the newest one stays."""
        while self._used_bytes() > self._max_bytes and self._prune_oldest():
            if self._used_bytes() < self._max_bytes * _KEEP_SHARE:
                break
        if self._max_days is not None:
            while self._prune_oldest(before=time.time() - self._max_days * 86400):
                pass
        if self._free_bytes() > _FREE_BYTES:  # what is left is soon used again
            self._connection.execute(f"PRAGMA incremental_vacuum({_PAGES_BACK})").fetchall()

    def _prune_oldest(self, before: float | None = None) -> bool:
        """Whether there was one to prune. In the order they were written: a clock may have gone backwards."""
        oldest = self._connection.execute(
            "SELECT id, kind, rollout_id, time FROM rollouts WHERE NOT pruned ORDER BY id LIMIT 2"
        ).fetchall()
        if len(oldest) < 2 or (before is not None and oldest[0][3] >= before):
            return False
        row, kind, rollout_id, _ = oldest[0]
        if kind == "train" and self._committed is not None and rollout_id > self._committed:
            return False
        with self._connection as connection:
            forget_groups(connection, row)
            connection.execute(  # those of samples
                "DELETE FROM spans WHERE rollout_id = ? AND (lane LIKE 'engine%' OR lane = 'reward')",
                (rollout_id,),
            )
            connection.execute("UPDATE rollouts SET pruned = 1 WHERE id = ?", (row,))
            if kind == "train":
                connection.execute(
                    "DELETE FROM ledger WHERE rollout = ? AND event IN ('generated', 'recalled')",
                    (rollout_id,),
                )
        return True

    def _used_bytes(self) -> int:
        return (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")

    def _free_bytes(self) -> int:
        return self._pragma("freelist_count") * self._pragma("page_size")

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])


def _single_events(part: _Part, error: Exception) -> list[_Part]:
    """Each of several events by itself, where one holds what cannot be written; none: it is the disk."""
    if isinstance(part, list) and len(part) > 1 and not isinstance(error, sqlite3.OperationalError):
        return [[note] for note in part]
    return []
