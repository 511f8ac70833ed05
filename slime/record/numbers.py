"""Tokens, log-probs, loss masks and weight versions of answers: those of small groups lie in one piece.

To pack the answers of several groups at once takes a tenth of the time that they take one by one. Answers of
many tokens have columns of their own in `samples`, so that nobody unpacks what is not looked at.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sqlite3
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
_PIECE_TOKENS = 16384  # of the groups in one piece: whoever looks at one answer unpacks it
_ALL_ONES = 1  # stands for a mask, or for all
_LISTS = frozenset({list})
_as_json = json.JSONEncoder(check_circular=False).encode  # `json.dumps` makes one for each call


@dataclass(frozen=True, slots=True)
class Tokens:
    """The numbers behind an answer. Log-probs and mask have one entry per response token; None: not known."""

    ids: list[int]
    log_probs: list[float] | None
    loss_mask: list[int] | None
    versions: list[tuple[str, int, int]]
    execution: int | None  # siblings of one fan-out, and the two of a pair, share it


class Packed(NamedTuple):
    """The numbers of one answer in a piece."""

    ids: list[int]
    log_probs: list[float] | None
    mask: list[int] | int | None  # 1: ones, as many as the response has tokens
    versions: str | None  # JSON, as in the column of that name


class Columns(NamedTuple):
    """Fields of samples, each of all: those whose numbers are packed."""

    tokens: Sequence[list[int]]
    rollout_log_probs: Sequence[list[float] | None]
    loss_mask: Sequence[list[int] | None]
    response_length: Sequence[int]
    version_spans: Sequence[list[tuple[str, int, int]]]

    def part(self, begin: int, end: int) -> Columns:
        fields: Iterable[Any] = (values[begin:end] for values in self)
        return Columns(*fields)


def pack_groups(columns: Columns, counts: Sequence[int]) -> list[tuple[int, bytes]] | None:
    """The numbers of the answers of groups, in pieces, each behind the place of its first answer.

    `counts`: of the answers of each. None: a group has too many tokens, or they are no plain lists. Example:
    of six groups of four answers with 4000 tokens a group, pieces begin at the places 0 and 16.
    """
    lengths = list(map(len, columns.tokens))
    pieces: list[int] = []  # where each begins
    end = room = 0
    for count in counts:
        begin, end = end, end + count
        size = sum(lengths[begin:end])
        if size > _FEW_TOKENS:
            return None
        if size > room or not pieces:
            pieces.append(begin)
            room = _PIECE_TOKENS
        room -= size
    packed: list[tuple[int, bytes]] = []
    for begin, after in itertools.pairwise([*pieces, end]):
        payload = pack_answers(columns.part(begin, after))
        if payload is None:
            return None
        packed.append((begin, payload))
    return packed


def pack_answers(columns: Columns) -> bytes | None:
    """The numbers of several answers; None: they are no plain lists.

    Example: two answers with tokens [5, 6, 7] and [5, 8], of which all but the first are responses, have the
    header {"count": 2, "code": "H", "masks": 1, "versions": [null]}: ids take two bytes, masks are all ones
    (else there is a list of them), and all have the same versions. Behind it are how many tokens and how many
    log-probs each has (-1: None) and which of the versions, then ids and log-probs: 3 2, 2 1, 0 0, 5 6 7 5 8.
    """
    tokens, log_probs, masks, lengths, spans = columns
    try:
        code, ids = _pack_ids(list(itertools.chain.from_iterable(tokens)))
        of, texts = _versions_of(spans)
        about = {"count": len(tokens), "code": code, "masks": _masks_of(masks, lengths), "versions": texts}
        header = _as_json(about).encode()
        counts = [len(row) if row is not None else -1 for row in log_probs]
        floats = itertools.chain.from_iterable([row for row in log_probs if row is not None])
        return b"".join(
            (
                struct.pack("<I", len(header)),
                header,
                pack_numbers("i", [*map(len, tokens), *counts, *of]),
                ids,
                pack_numbers("f", list(floats)),
            )
        )
    except (TypeError, ValueError, OverflowError, struct.error):
        return None


def _pack_ids(ids: list[int]) -> tuple[str, bytes]:
    with contextlib.suppress(ValueError):  # a larger vocabulary; a small one takes two thirds of the time so
        return "H", np.frombuffer(bytes(ids), np.uint8).astype("<u2").tobytes()
    try:
        return "H", pack_numbers("H", ids)
    except struct.error:
        return "I", pack_numbers("I", ids)


def _versions_of(spans: Sequence[Sequence[tuple[Any, ...]]]) -> tuple[Iterable[int], list[str | None]]:
    """Which one of some texts is that of each: few differ, and each is written once."""
    is_one = set(map(len, spans)) == {1}  # of most answers one version wrote all
    keys: list[tuple[Any, ...]] = [span for [span] in spans] if is_one else list(map(tuple, spans))
    try:
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    except TypeError:  # spans that are lists
        return _versions_of([[tuple(span) for span in key] for key in spans])
    texts = [_versions((key,) if is_one else key) if key else None for key in numbers]
    return map(numbers.__getitem__, keys), texts


def unpack_answers(data: bytes) -> list[Packed]:
    """Inverse of `pack_answers`. ValueError: it did not write these bytes, or not all of them are there."""
    try:
        (size,) = struct.unpack_from("<I", data)
        header, at = json.loads(data[4 : 4 + size].decode()), 4 + size
        if "count" not in header:
            return _unpack_group(header, data, at)
        [lengths, counts, of], at = _numbers(data, at, "<i4", [header["count"]] * 3)
        masks = header["masks"] if isinstance(header["masks"], list) else [_ALL_ONES] * len(lengths)
        versions = [header["versions"][number] for number in of]
        code, counts = header["code"], [None if count == -1 else count for count in counts]
        return _unpack(data, at, code, lengths, counts, masks, versions)
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"these are not the numbers of answers ({said})") from error


def _unpack_group(header: dict[str, Any], data: bytes, at: int) -> list[Packed]:
    """The same as schema 3 has it, of one group: all lists are in the header."""
    code, lengths = header["ids"]
    return _unpack(data, at, code, lengths, header["log_probs"], header["masks"], header["versions"])


def _unpack(
    data: bytes,
    at: int,
    code: str,
    lengths: list[int],
    counts: list[int | None],
    masks: list[Any],
    versions: list[str | None],
) -> list[Packed]:
    if code not in ("H", "I"):
        raise KeyError(code)
    ids, at = _numbers(data, at, f"<u{struct.calcsize('<' + code)}", lengths)
    floats, at = _numbers(data, at, "<f4", [count or 0 for count in counts])
    if at != len(data):
        raise ValueError("there are too many")
    log_probs = [None if count is None else row for count, row in zip(counts, floats, strict=True)]
    return [Packed(*row) for row in zip(ids, log_probs, masks, versions, strict=True)]


def _numbers(data: bytes, at: int, kind: str, lengths: list[int]) -> tuple[list[list[Any]], int]:
    if any(length < 0 for length in lengths):
        raise ValueError("a length below 0")
    values = np.frombuffer(data, kind, sum(lengths), at)
    ends = list(itertools.accumulate(lengths, initial=0))
    return [values[a:b].tolist() for a, b in itertools.pairwise(ends)], at + values.nbytes


def _masks_of(masks: Sequence[Any], lengths: Sequence[int]) -> list[Any] | int:
    if _LISTS.issuperset(map(type, masks)) and list(masks) == list(map(_ones, lengths)):  # of most
        return _ALL_ONES
    return [_mask(mask, length) for mask, length in zip(masks, lengths, strict=True)]


@functools.lru_cache(maxsize=1024)
def _ones(count: int) -> list[int]:
    """Not to be changed: most answers have one of few lengths."""
    return [1] * count


def _mask(mask: list[int] | None, length: int) -> list[int] | int | None:
    if type(mask) is list and len(mask) == length and mask.count(1) == length:
        return _ALL_ONES
    return mask


def pack_alone(sample: Sample) -> tuple[bytes, bytes | None, bytes | None, str | None]:
    """Tokens, log-probs, mask and versions of one answer, each in a column."""
    mask = mask_of(sample)
    return (
        pack_ids(sample.tokens),
        None if sample.rollout_log_probs is None else pack_floats(sample.rollout_log_probs),
        None if mask is None else pack_mask(mask),
        versions_text(sample),
    )


def mask_of(sample: Sample) -> list[int] | None:
    """What is trained of its response: of a sample that a filter took out of the loss, nothing."""
    return [0] * sample.response_length if sample.remove_sample else sample.loss_mask


def versions_text(sample: Sample) -> str | None:
    return _versions(tuple(map(tuple, sample.version_spans))) if sample.version_spans else None


@functools.lru_cache(maxsize=1024)
def _versions(spans: tuple[tuple[Any, ...], ...]) -> str:
    """Most samples of a rollout have the same."""
    return json.dumps(spans, default=str)


class TokenReader:
    """Gives the numbers of answers; the piece that was read last is kept: neighbours are asked for next."""

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection
        self._first = 0  # row of the first answer in the piece
        self._piece: list[Packed] = []

    def read(self, row: int) -> Tokens:
        """Those of the answer with this row. ValueError: they are damaged."""
        found = self._connection.execute(
            "SELECT group_row, num_tokens, execution, tokens, log_probs, loss_mask, versions FROM samples "
            "WHERE id = ?",
            (row,),
        ).fetchone()
        group, length, execution, ids, log_probs, mask, versions = found
        if ids is None and (packed := self._packed(group, row)) is not None:
            ones = [1] * length if isinstance(packed.mask, int) else packed.mask
            return Tokens(packed.ids, packed.log_probs, ones, _spans(packed.versions), execution)
        return Tokens(
            unpack_ids(ids or b""),
            None if log_probs is None else unpack_floats(log_probs),
            None if mask is None else unpack_mask(mask),
            _spans(versions),
            execution,
        )

    def _packed(self, group: int, row: int) -> Packed | None:
        if not self._has(row):
            self._look_up(group, row)
        return self._piece[row - self._first] if self._has(row) else None

    def _has(self, row: int) -> bool:
        return 0 <= row - self._first < len(self._piece)

    def _look_up(self, group: int, row: int) -> None:
        query = "SELECT first_sample, payload FROM numbers_of_answers WHERE first_sample <= ? "
        for first, payload in _ask(self._connection, query + "ORDER BY first_sample DESC LIMIT 1", row):
            self._first, self._piece = first, unpack_answers(payload)
        if not self._has(row):  # of schema 3: a piece for each group, whose answers lie one behind the other
            query = "SELECT (SELECT min(id) FROM samples WHERE group_row = ?1), payload FROM numbers "
            for first, payload in _ask(self._connection, query + "WHERE group_row = ?1", group):
                self._first, self._piece = first, unpack_answers(payload)


def _ask(connection: sqlite3.Connection, query: str, row: int) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(query, (row,)).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):  # of an earlier schema
            return []
        raise


def _spans(text: str | None) -> list[tuple[str, int, int]]:
    return [(str(v), int(a), int(b)) for v, a, b in json.loads(text)] if text else []
