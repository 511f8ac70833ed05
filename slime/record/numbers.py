"""Tokens, log-probs, loss masks and weight versions of answers: those of a small group lie in one piece.

To pack a group at once takes a fifth of the time that its answers take one by one. Answers of many tokens
have columns of their own in `samples`, so that nobody unpacks what is not looked at.
"""

from __future__ import annotations

import functools
import itertools
import json
import sqlite3
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.record.packed import (
    pack_floats,
    pack_ids,
    pack_mask,
    pack_numbers,
    unpack_floats,
    unpack_ids,
    unpack_mask,
)
from slime.utils.types import Sample

_FEW_TOKENS = 4096  # of a whole group
_ALL_ONES = 1  # stands for a mask
_as_json = json.JSONEncoder(check_circular=False).encode  # `json.dumps` makes one for each call


@dataclass(frozen=True, slots=True)
class Tokens:
    """The numbers behind an answer. Log-probs and mask have one entry per response token; None: not known."""

    ids: list[int]
    log_probs: list[float] | None
    loss_mask: list[int] | None
    versions: list[tuple[str, int, int]]
    execution: int | None  # siblings of one fan-out, and the two of a pair, share it


def pack_group(samples: Sequence[Sample]) -> bytes | None:
    """The numbers of a group's answers; None: they are too many, or no plain lists.

    Example: two answers with tokens [5, 6, 7] and [5, 8], of which all but the first are responses, have the
    header {"ids": ["H", [3, 2]], "log_probs": [2, 1], "masks": null, "versions": ["[]", "[]"]}.
    """
    lists = [sample.tokens for sample in samples]
    lengths = list(map(len, lists))
    if sum(lengths) > _FEW_TOKENS:
        return None
    log_probs = [sample.rollout_log_probs for sample in samples]
    masks = [_mask(sample.loss_mask, sample.response_length) for sample in samples]
    try:
        flat = list(itertools.chain.from_iterable(lists))
        code = "H" if max(flat, default=0) < 1 << 16 else "I"
        ids = pack_numbers(code, flat)
        floats = pack_floats(list(itertools.chain.from_iterable(row for row in log_probs if row is not None)))
        header = _as_json(
            {
                "ids": [code, lengths],
                "log_probs": [None if row is None else len(row) for row in log_probs],
                "masks": masks,
                "versions": _versions_of(samples),
            }
        ).encode()
    except (TypeError, ValueError, OverflowError, struct.error):
        return None
    return b"".join((struct.pack("<I", len(header)), header, ids, floats))


def unpack_group(data: bytes) -> list[dict[str, Any]]:
    """Inverse of `pack_group`. ValueError: it did not write these bytes, or not all of them are there."""
    try:
        (size,) = struct.unpack_from("<I", data)
        header, at = json.loads(data[4 : 4 + size].decode()), 4 + size
        code, lengths = header["ids"]
        if code not in ("H", "I"):
            raise KeyError(code)
        ids, at = _numbers(data, at, f"<u{struct.calcsize('<' + code)}", lengths)
        counts = header["log_probs"]
        floats, at = _numbers(data, at, "<f4", [count or 0 for count in counts])
        if at != len(data):
            raise ValueError("there are too many")
        rows = zip(ids, floats, counts, header["masks"], header["versions"], strict=True)
        return [
            {"tokens": row, "log_probs": None if count is None else values, "mask": mask, "versions": text}
            for row, values, count, mask, text in rows
        ]
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"these are not the numbers of a group ({said})") from error


def _numbers(data: bytes, at: int, kind: str, lengths: list[int]) -> tuple[list[list[Any]], int]:
    if any(length < 0 for length in lengths):
        raise ValueError("a length below 0")
    values = np.frombuffer(data, kind, sum(lengths), at)
    ends = list(itertools.accumulate(lengths, initial=0))
    return [values[a:b].tolist() for a, b in itertools.pairwise(ends)], at + values.nbytes


def _mask(mask: list[int] | None, length: int) -> list[int] | int | None:
    if type(mask) is list and len(mask) == length and mask.count(1) == length:
        return _ALL_ONES
    return mask


def pack_alone(sample: Sample) -> tuple[bytes, bytes | None, bytes | None, str | None]:
    """Tokens, log-probs, mask and versions of one answer, each in a column."""
    return (
        pack_ids(sample.tokens),
        None if sample.rollout_log_probs is None else pack_floats(sample.rollout_log_probs),
        None if sample.loss_mask is None else pack_mask(sample.loss_mask),
        versions_text(sample),
    )


def versions_text(sample: Sample) -> str | None:
    return _versions(tuple(map(tuple, sample.version_spans))) if sample.version_spans else None


def _versions_of(samples: Sequence[Sample]) -> list[str | None]:
    spans = [sample.version_spans for sample in samples]
    if spans.count(spans[0]) == len(spans):  # most groups are made by one version
        return [versions_text(samples[0])] * len(spans)
    return list(map(versions_text, samples))


@functools.lru_cache(maxsize=1024)
def _versions(spans: tuple[tuple[Any, ...], ...]) -> str:
    """Most samples of a rollout have the same."""
    return json.dumps(spans, default=str)


class TokenReader:
    """Gives the numbers of answers; the group that was read last is kept: siblings are asked for in a row."""

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection
        self._group: int | None = None
        self._rows: dict[int, dict[str, Any]] = {}  # by the row of the answer

    def read(self, row: int) -> Tokens:
        """Those of the answer with this row. ValueError: they are damaged."""
        found = self._connection.execute(
            "SELECT group_row, num_tokens, execution, tokens, log_probs, loss_mask, versions FROM samples "
            "WHERE id = ?",
            (row,),
        ).fetchone()
        group, length, execution, ids, log_probs, mask, versions = found
        if ids is None and (packed := self._packed(group, row)) is not None:
            ones = [1] * length if packed["mask"] == _ALL_ONES else packed["mask"]
            return Tokens(packed["tokens"], packed["log_probs"], ones, _spans(packed["versions"]), execution)
        return Tokens(
            unpack_ids(ids or b""),
            None if log_probs is None else unpack_floats(log_probs),
            None if mask is None else unpack_mask(mask),
            _spans(versions),
            execution,
        )

    def _packed(self, group: int, row: int) -> dict[str, Any] | None:
        if group != self._group:
            payload = _ask(self._connection, "SELECT payload FROM numbers WHERE group_row = ?", group)
            rows = _ask(self._connection, "SELECT id FROM samples WHERE group_row = ? ORDER BY id", group)
            tables = unpack_group(payload[0][0]) if payload else []
            self._group = group
            self._rows = dict(zip((number for (number,) in rows), tables, strict=False))
        return self._rows.get(row)


def _ask(connection: sqlite3.Connection, query: str, group: int) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(query, (group,)).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):  # of an earlier schema
            return []
        raise


def _spans(text: str | None) -> list[tuple[str, int, int]]:
    return [(str(v), int(a), int(b)) for v, a, b in json.loads(text)] if text else []
