"""Data that the record stores in addition to the samples: the text of each token id, and advantages."""

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slime.utils.packed_samples import values_of
from slime.utils.types import Sample

# Name -> lowest value, highest value and number of bins of equal width. Most ratios are 1: a bin's middle.
BINS = {"ratio": (0.475, 1.525, 21), "entropy": (0.0, 6.0, 24)}
Pieces = Callable[[Sequence[int]], Sequence[str]]  # token ids -> the text of each


@dataclass(frozen=True, slots=True)
class Advantage:
    """The advantage that the trainer computed for one sample. `tokens` None: every token has `value`.

    Example: Advantage(25, 0.7071, None) is the advantage of all tokens of the sample with index 25.
    """

    sample_index: int
    value: float
    tokens: list[float] | None = None


class PieceBook:
    """Remembers which token ids have their text in the record already. Used by the writer's thread only."""

    def __init__(self, pieces: Pieces):
        self._pieces = pieces
        self._known: set[int] = set()

    def write(self, connection: sqlite3.Connection, samples: Iterable[Sample]) -> None:
        """Write the text of ids that occur for the first time since the start."""
        ids = sorted(set().union(*map(_distinct_tokens, samples)) - self._known)
        if ids:
            texts = [text.encode("utf-8", "replace").decode() for text in self._pieces(ids)]
            rows = zip(ids, texts, strict=True)
            connection.executemany("INSERT OR IGNORE INTO pieces VALUES (?, ?)", rows)
            self._known.update(ids)


def _distinct_tokens(sample: Sample) -> Iterable[int]:
    held = values_of(sample, "tokens")
    return np.unique(held).tolist() if isinstance(held, np.ndarray) else held


def write_advantages(
    connection: sqlite3.Connection, rollout_id: int, advantages: Iterable[Advantage]
) -> None:
    """Write the advantages of samples in the record; those of other samples are skipped."""
    known = {a.sample_index: a for a in advantages}
    rows = connection.execute(
        "SELECT s.sample_index, s.id FROM rollouts r JOIN groups g ON g.rollout = r.id "
        "JOIN samples s ON s.group_row = g.id WHERE r.kind = 'train' AND r.rollout_id = ? "
        "AND g.outcome = 'trained' ORDER BY s.id",
        (rollout_id,),
    ).fetchall()
    if len({index for index, _ in rows}) < len(rows):
        return  # samples that share an index cannot be distinguished
    found = [(row, known[index]) for index, row in rows if index in known]
    connection.executemany(
        "INSERT OR REPLACE INTO advantages VALUES (?, ?, ?)",
        [(row, a.value, None if a.tokens is None else _as_bytes(a.tokens)) for row, a in found],
    )


def write_histograms(
    connection: sqlite3.Connection, rollout_id: int, parts: Sequence[dict[str, list[int]]]
) -> None:
    """Write the histograms of a step's trained tokens, summed over `parts`, which have the bins of `BINS`."""
    for name in BINS:
        columns = zip(*(part[name] for part in parts if name in part), strict=True)
        if total := [sum(column) for column in columns]:
            row = (rollout_id, name, json.dumps(total))
            connection.execute("INSERT OR REPLACE INTO histograms VALUES (?, ?, ?)", row)


def read_histogram(connection: sqlite3.Connection, name: str, steps: Sequence[int]) -> list[list[int]]:
    """Return the number of tokens in each bin for each step; zeros where it was not recorded."""
    query = (
        f"SELECT rollout_id, counts FROM histograms WHERE name = ? AND rollout_id IN {tuple([*steps, -1])}"
    )
    found: dict[int, list[int]] = {}
    with contextlib.suppress(sqlite3.OperationalError):  # an older version wrote the record
        found = {step: json.loads(counts) for step, counts in connection.execute(query, (name,))}
    return [found.get(step, [0] * BINS[name][2]) for step in steps]


def _as_bytes(values: Sequence[float]) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def read_advantage(connection: sqlite3.Connection, row: int) -> Advantage | None:
    """Return the advantage of the sample with this row; None: the trainer reported none."""
    found = connection.execute(
        "SELECT s.sample_index, a.value, a.tokens FROM advantages a JOIN samples s ON s.id = a.sample "
        "WHERE s.id = ?",
        (row,),
    ).fetchone()
    if found is None:
        return None
    index, value, tokens = found
    return Advantage(index, value, None if tokens is None else np.frombuffer(tokens, "<f4").tolist())
