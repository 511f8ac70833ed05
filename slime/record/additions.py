"""What is known of answers beside the answers themselves: the text of their tokens, and their advantages."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slime.record.packed import pack_floats, unpack_floats
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
        self._pieces = pieces
        self._known: set[int] = set()

    def write(self, connection: sqlite3.Connection, samples: Iterable[Sample]) -> None:
        """The text of ids that occur for the first time since the start."""
        ids = sorted(set().union(*(sample.tokens for sample in samples)) - self._known)
        if ids:
            texts = [text.encode("utf-8", "replace").decode() for text in self._pieces(ids)]
            rows = zip(ids, texts, strict=True)
            connection.executemany("INSERT OR IGNORE INTO pieces VALUES (?, ?)", rows)
            self._known.update(ids)


def write_advantages(
    connection: sqlite3.Connection, rollout_id: int, advantages: Iterable[Advantage]
) -> None:
    """Writes the advantages of samples that were recorded before; others are left out."""
    known = {a.sample_index: a for a in advantages}
    if not known:
        return
    rows = connection.execute(
        "SELECT s.sample_index, s.id, g.id FROM rollouts r JOIN groups g ON g.rollout = r.id "
        "JOIN samples s ON s.group_row = g.id WHERE r.kind = 'train' AND r.rollout_id = ? "
        "AND g.outcome = 'trained' ORDER BY s.id",
        (rollout_id,),
    ).fetchall()
    if len({index for index, _, _ in rows}) < len(rows):
        return  # answers with one index in common cannot be told apart
    by_token: list[tuple[int, float, bytes]] = []
    of_groups: dict[int, list[float]] = {}
    for index, row, group in rows:
        found = known.get(index)
        if found is not None and found.tokens is not None:
            by_token.append((row, found.value, pack_floats(found.tokens)))
        of_groups.setdefault(group, []).append(math.nan if found is None else found.value)
    connection.executemany("INSERT OR REPLACE INTO advantages VALUES (?, ?, ?)", by_token)
    connection.executemany(
        "INSERT OR REPLACE INTO group_advantages VALUES (?, ?)",
        [(group, np.array(values, "<f8").tobytes()) for group, values in of_groups.items()],
    )


def read_advantage(connection: sqlite3.Connection, row: int) -> Advantage | None:
    """That of the answer with this row; None: there is none, or the record is of an earlier schema."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    index, group = connection.execute(
        "SELECT sample_index, group_row FROM samples WHERE id = ?", (row,)
    ).fetchone()
    if "advantages" in tables:
        found = connection.execute("SELECT value, tokens FROM advantages WHERE sample = ?", (row,)).fetchone()
        if found is not None:
            return Advantage(index, found[0], None if found[1] is None else unpack_floats(found[1]))
    if "group_advantages" in tables:
        [(place,)] = connection.execute(
            "SELECT count(*) FROM samples WHERE group_row = ? AND id < ?", (group, row)
        )
        payload = connection.execute(
            "SELECT payload FROM group_advantages WHERE group_row = ?", (group,)
        ).fetchone()
        values = np.frombuffer(payload[0], "<f8") if payload is not None else np.zeros(0)
        if place < len(values) and not math.isnan(values[place]):
            return Advantage(index, float(values[place]))
    return None
