"""What is known of answers beside the answers themselves: the text of their tokens, and their advantages."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slime.record.packed import pack_floats
from slime.utils.types import Sample

Pieces = Callable[[Sequence[int]], Sequence[str]]  # token ids -> the text of each


@dataclass(frozen=True, slots=True)
class Advantage:
    """What the trainer made of one answer. `tokens` None: every token has `value`.

    Example: Advantage(25, 0.7071, None) is the advantage of all tokens of the sample with index 25.
    """

    sample_index: int
    value: float
    tokens: list[float] | None = None


class PieceBook:
    """Which token ids have their text in the record already; used on the writer's thread alone."""

    def __init__(self, pieces: Pieces):
        self._pieces, self._known = pieces, np.zeros(0, dtype=np.int64)

    def write(self, connection: sqlite3.Connection, samples: Iterable[Sample]) -> None:
        """The text of ids that occur for the first time since the start."""
        lists = [np.asarray(sample.tokens, dtype=np.int64) for sample in samples if sample.tokens]
        if not lists:
            return
        new = np.setdiff1d(np.unique(np.concatenate(lists)), self._known, assume_unique=True)
        if len(new):
            ids = new.tolist()
            texts = [text.encode("utf-8", "replace").decode() for text in self._pieces(ids)]
            rows = zip(ids, texts, strict=True)
            connection.executemany("INSERT OR IGNORE INTO pieces VALUES (?, ?)", rows)
            self._known = np.union1d(self._known, new)


def write_advantages(
    connection: sqlite3.Connection, rollout_id: int, advantages: Iterable[Advantage]
) -> None:
    """Writes the advantages of samples that were recorded before; others are left out."""
    rows = connection.execute(
        "SELECT s.sample_index, s.id FROM rollouts r JOIN groups g ON g.rollout = r.id "
        "JOIN samples s ON s.group_row = g.id WHERE r.kind = 'train' AND r.rollout_id = ? "
        "AND g.outcome = 'trained'",
        (rollout_id,),
    ).fetchall()
    row_of = dict(rows)
    if len(row_of) < len(rows):
        return  # answers with one index in common cannot be told apart
    connection.executemany(
        "INSERT OR REPLACE INTO advantages VALUES (?, ?, ?)",
        [
            (row_of[a.sample_index], a.value, None if a.tokens is None else pack_floats(a.tokens))
            for a in advantages
            if a.sample_index in row_of
        ],
    )
