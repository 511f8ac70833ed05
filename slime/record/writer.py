"""The one writer of a run's record: a thread writes each rollout that is handed over as one transaction.

The run waits for the disk only when several rollouts are waiting already. A write that fails (a full disk) is
told once and the run goes on; how many could not be written is noted in the file once it can be again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.record.entries import Entry, prompt_hash, prompt_text
from slime.record.packed import pack_floats, pack_ids, pack_mask
from slime.record.schema import create_or_open
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_MAX_WAITING = 4  # rollouts
_KEEP_SHARE = 0.9  # of the limit, after rows were removed
_PAGES_BACK = 20_000  # returned to the file system at a time


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


class RecordWriter:
    """`max_bytes`: about how large the file may grow; the samples of the oldest rollouts go first."""

    def __init__(self, path: Path, run_id: str, max_bytes: int):
        self._path, self._max_bytes = path, max_bytes
        self._connection = create_or_open(path, run_id)
        self._waiting: queue.Queue[_Rollout | _Work | None] = queue.Queue(_MAX_WAITING)
        self._missed = 0
        self._closed = False
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
        self._waiting.put(_Rollout(kind, rollout_id, tuple(entries), version, reward_key, time.time()))

    def submit(self, what: str, write: Callable[[sqlite3.Connection], object]) -> None:
        """Hand over anything else: `write` is called on the writer's thread, as one transaction."""
        self._waiting.put(_Work(what, write))

    def close(self) -> None:
        """Writes what was handed over; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._waiting.put(None)
            self._thread.join()
            with contextlib.suppress(sqlite3.Error):  # by itself it is done only if nobody reads just now
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.close()

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            if isinstance(item, _Rollout):
                what = f"the samples of {item.kind} {item.rollout_id}"
            else:
                what = item.what
            try:
                if isinstance(item, _Rollout):
                    self._write(item)
                    self._prune()
                else:
                    with self._connection as connection:
                        item.write(connection)
            except sqlite3.Error as error:
                self._connection.rollback()
                if not self._missed:
                    logger.warning(
                        "%s cannot be written (%s): %s: not recorded; the run goes on.",
                        *(self._path, error, what),
                    )
                self._missed += isinstance(item, _Rollout)

    def _write(self, rollout: _Rollout) -> None:
        samples = [sample for entry in rollout.entries for sample in entry.samples]
        rewards = [r for r in (_reward(sample, rollout.reward_key) for sample in samples) if r is not None]
        with self._connection as connection:
            # With its groups and samples: a rollout that is made again after a resume replaces the first.
            key = (rollout.kind, rollout.rollout_id)
            connection.execute("DELETE FROM rollouts WHERE kind = ? AND rollout_id = ?", key)
            row = connection.execute(
                "INSERT INTO rollouts (kind, rollout_id, time, version, num_groups, num_samples, mean_reward)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *key,
                    rollout.time,
                    rollout.version,
                    len(rollout.entries),
                    len(samples),
                    sum(rewards) / len(rewards) if rewards else None,
                ),
            ).lastrowid
            assert row is not None
            for entry in rollout.entries:
                _write_entry(connection, row, entry, rollout.reward_key)
            if self._missed:
                values = ("missed_rollouts", str(self._missed))
                connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)

    def _prune(self) -> None:
        """Remove groups and samples of the oldest rollouts until the file fits; the newest one stays."""
        while self._used_bytes() > self._max_bytes:
            oldest = self._connection.execute(
                "SELECT id FROM rollouts WHERE NOT pruned ORDER BY time, id LIMIT 2"
            ).fetchall()
            if len(oldest) < 2:
                break
            with self._connection as connection:
                connection.execute("DELETE FROM groups WHERE rollout = ?", oldest[0])
                connection.execute(
                    "DELETE FROM spans WHERE rollout_id = (SELECT rollout_id FROM rollouts WHERE id = ?) "
                    "AND lane IN ('engines', 'reward')",  # one for each sample
                    oldest[0],
                )
                connection.execute("UPDATE rollouts SET pruned = 1 WHERE id = ?", oldest[0])
            if self._used_bytes() < self._max_bytes * _KEEP_SHARE:
                break
        self._connection.execute(f"PRAGMA incremental_vacuum({_PAGES_BACK})").fetchall()

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)


def _write_entry(connection: sqlite3.Connection, rollout: int, entry: Entry, reward_key: str | None) -> None:
    first = entry.samples[0]
    rewards = [r for r in (_reward(sample, reward_key) for sample in entry.samples) if r is not None]
    prompt = _text(prompt_text(first.prompt))
    group = connection.execute(
        "INSERT INTO groups (rollout, dataset, group_index, prompt, prompt_hash, label, outcome, reason, "
        "spread) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            rollout,
            entry.dataset,
            first.group_index,
            prompt,
            prompt_hash(prompt),
            None
            if first.label is None
            else _text(first.label if isinstance(first.label, str) else _json(first.label)),
            entry.outcome,
            entry.reason and _text(entry.reason),
            max(rewards) - min(rewards) if len(rewards) > 1 else None,
        ),
    ).lastrowid
    connection.executemany(
        "INSERT INTO samples (group_row, sample_index, execution, status, reward, reward_parts, failure, "
        "response, num_tokens, tokens, log_probs, loss_mask, versions) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(group, *_sample_row(sample, reward_key)) for sample in entry.samples],
    )


def _sample_row(sample: Sample, reward_key: str | None) -> tuple[Any, ...]:
    failure = sample.reward_failure
    return (
        sample.index,
        sample.rollout_id,
        sample.status.value,
        _reward(sample, reward_key),
        _json(sample.reward) if isinstance(sample.reward, dict) else None,
        _text(f"{failure.kind}: {failure.reason}") if failure is not None else None,
        _text(sample.response),
        sample.response_length,
        pack_ids(sample.tokens),
        None if sample.rollout_log_probs is None else pack_floats(sample.rollout_log_probs),
        None if sample.loss_mask is None else pack_mask(sample.loss_mask),
        _json(sample.version_spans) if sample.version_spans else None,
    )


def _reward(sample: Sample, key: str | None) -> float | None:
    value = sample.reward.get(key) if isinstance(sample.reward, dict) and key else sample.reward
    return float(value) if isinstance(value, (int, float)) else None


def _text(value: str) -> str:
    """Half of a surrogate pair, which a tokenizer may leave at a cut, is no text that a file can hold."""
    return value.encode("utf-8", "replace").decode("utf-8")


def _json(value: object) -> str:
    return _text(json.dumps(value, ensure_ascii=False, default=str))
