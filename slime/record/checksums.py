"""A checksum of a rollout's answers, by which the audit sees that they are those that were written.

SQLite notices damage to its own structure, not to what is stored in it.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence

import numpy as np


def checksum_of(
    numbers: Iterable[bytes],
    lengths: Sequence[int],
    rewards: Sequence[float | None],
    responses: Sequence[str],
) -> int | None:
    """Over tokens as they are packed, numbers of tokens, rewards and texts; None: a length is no number."""
    try:
        # Sums with 0.0: SQLite keeps no sign of zero, and a reward that is no number as NULL.
        scores = np.array(rewards, np.float64) + 0.0
        scores[np.isnan(scores)] = np.nan
        counts = np.array(lengths, np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    found = 0
    for part in (*numbers, counts.tobytes(), scores.tobytes(), "\0".join(responses).encode()):
        found = zlib.crc32(part, found)
    return found


def checksum_in(connection: sqlite3.Connection, rollout: int) -> int | None:
    """The checksum of the answers that a rollout's row has now."""
    columns = "s.id, s.num_tokens, s.reward, s.response, s.tokens, s.log_probs, s.loss_mask, s.versions"
    rows = connection.execute(
        f"SELECT {columns} FROM samples s JOIN groups g ON g.id = s.group_row WHERE g.rollout = ? "
        "ORDER BY s.id",
        (rollout,),
    ).fetchall()
    if not rows:
        return checksum_of((), (), (), ())
    ids, lengths, rewards, responses, *_ = zip(*rows, strict=True)
    pieces = connection.execute(
        "SELECT payload FROM numbers_of_answers WHERE first_sample BETWEEN ? AND ? ORDER BY first_sample",
        (ids[0], ids[-1]),
    ).fetchall()
    numbers = [payload for (payload,) in pieces] or in_columns(row[4:] for row in rows)
    return checksum_of(numbers, lengths, rewards, responses)


def in_columns(alone: Iterable[Sequence[bytes | str | None]]) -> list[bytes]:
    """The numbers of answers that have columns of their own."""
    return [
        part.encode() if isinstance(part, str) else part
        for parts in alone
        for part in parts
        if part is not None
    ]
