"""Converts a record that slime wrote before it used one codec (schemas 1 to 5) to the present tables.

A run that resumes converts its record once, in one transaction; readers convert a copy in memory. The module
can be deleted after the next release, together with `_OLDER` in slime.record.schema and its tests.
Stored samples and batches that are damaged are left out: the run generates them again.
"""

import contextlib
import itertools
import json
import math
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from slime.record.samples import encode_numbers
from slime.record.tables import SCHEMA_NUMBER, create_tables
from slime.utils import codec

_ADDED_COLUMNS = (("groups", "spread REAL"), ("rollouts", "checksum INTEGER"), ("samples", "numbers BLOB"))
_DAMAGE = (ValueError, TypeError, LookupError, struct.error)  # raised by damaged bytes
_DROPPED = ("numbers", "numbers_of_answers", "group_advantages", "ledger_samples", "old_finished")


def convert(connection: sqlite3.Connection) -> None:
    """Bring the tables to the present schema. sqlite3.Error: the file is damaged."""
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        for table, column in _ADDED_COLUMNS:
            if column.split()[0] not in _columns(connection, table):
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
        if _columns(connection, "ledger_finished"):
            connection.execute("ALTER TABLE ledger_finished RENAME TO old_finished")
            connection.execute("DROP INDEX IF EXISTS ledger_finished_of_group")
        create_tables(connection)
        _convert_numbers(connection)
        _convert_advantages(connection)
        _convert_finished(connection)
        _convert_rollouts(connection)
        for table in _DROPPED:
            connection.execute(f"DROP TABLE IF EXISTS {table}")
        connection.execute("UPDATE rollouts SET checksum = NULL")  # it belonged to the former bytes
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(SCHEMA_NUMBER),))


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def _rows(connection: sqlite3.Connection, query: str, table: str) -> list[tuple[Any, ...]]:
    return connection.execute(query).fetchall() if _columns(connection, table) else []


def _convert_numbers(connection: sqlite3.Connection) -> None:
    """Move token ids, log-probs, masks and versions from shared pieces and four columns into `numbers`."""
    if "tokens" not in _columns(connection, "samples"):
        return
    lengths = dict(connection.execute("SELECT id, num_tokens FROM samples"))

    def store(row: int, ids: Any, log_probs: Any, mask: Any, versions: str | None) -> None:
        if row in lengths:
            ones = [1] * lengths[row] if mask == 1 else mask
            spans = json.loads(versions) if versions else []
            numbers = encode_numbers(ids, log_probs, ones, lengths[row], spans)
            connection.execute("UPDATE samples SET numbers = ? WHERE id = ?", (numbers, row))

    first_of_group = "(SELECT min(id) FROM samples s WHERE s.group_row = n.group_row)"
    for query, table in (
        ("SELECT first_sample, payload FROM numbers_of_answers", "numbers_of_answers"),
        (f"SELECT {first_of_group}, payload FROM numbers n", "numbers"),
    ):
        for first, payload in _rows(connection, query, table):
            with contextlib.suppress(*_DAMAGE):
                for place, answer in enumerate(_unpack_answers(payload)):
                    store(first + place, *answer)
    query = "SELECT id, tokens, log_probs, loss_mask, versions FROM samples WHERE numbers IS NULL"
    for row, ids, log_probs, mask, versions in connection.execute(query).fetchall():
        with contextlib.suppress(*_DAMAGE):
            singles = None if log_probs is None else np.frombuffer(log_probs, "<f4")
            runs = None if mask is None else _unpack_ids(mask)
            ones = None if runs is None else [n % 2 for n, length in enumerate(runs) for _ in range(length)]
            if ids is not None:
                store(row, _unpack_ids(ids), singles, ones, versions)
    connection.execute("UPDATE samples SET numbers = x'' WHERE numbers IS NULL")
    connection.execute("UPDATE samples SET tokens = NULL, log_probs = NULL, loss_mask = NULL")


def _unpack_ids(data: bytes) -> list[int]:
    """Read ids of equal size; the first byte is their number of bytes."""
    width = data[0] if data else 4
    rows = np.frombuffer(data, np.uint8, offset=min(1, len(data))).reshape(-1, width)
    full = np.zeros((len(rows), 4), np.uint8)
    full[:, :width] = rows
    found: list[int] = full.reshape(-1).view("<u4").tolist()
    return found


def _unpack_answers(data: bytes) -> list[tuple[Any, ...]]:
    """Read a piece with the numbers of several samples: (ids, log-probs, mask, versions) of each."""
    (size,) = struct.unpack_from("<I", data)
    header, at = json.loads(data[4 : 4 + size].decode()), 4 + size
    if "count" in header:
        count = header["count"]
        table = np.frombuffer(data, "<i4", 3 * count, at).reshape(3, count).tolist()
        at += 12 * count
        lengths, counts = table[0], [None if n == -1 else n for n in table[1]]
        versions = [header["versions"][n] for n in table[2]]
        masks = header["masks"] if isinstance(header["masks"], list) else [1] * count
        code = header["code"]
    else:  # schema 3
        (code, lengths), counts = header["ids"], header["log_probs"]
        masks, versions = header["masks"], header["versions"]
    ids, at = _cut(data, at, {"H": "<u2", "I": "<u4"}[code], lengths)
    floats, at = _cut(data, at, "<f4", [n or 0 for n in counts])
    log_probs = [None if n is None else row for n, row in zip(counts, floats, strict=True)]
    return list(zip(ids, log_probs, masks, versions, strict=True))


def _cut(data: bytes, at: int, dtype: str, lengths: Sequence[int]) -> tuple[list[list[Any]], int]:
    values = np.frombuffer(data, dtype, sum(lengths), at)
    ends = itertools.accumulate(lengths, initial=0)
    return [values[a:b].tolist() for a, b in itertools.pairwise(ends)], at + values.nbytes


def _convert_advantages(connection: sqlite3.Connection) -> None:
    for group, payload in _rows(connection, "SELECT * FROM group_advantages", "group_advantages"):
        rows = connection.execute("SELECT id FROM samples WHERE group_row = ? ORDER BY id", (group,))
        for (row,), value in zip(rows.fetchall(), np.frombuffer(payload, "<f8").tolist(), strict=False):
            if not math.isnan(value):
                connection.execute("INSERT OR IGNORE INTO advantages VALUES (?, ?, NULL)", (row, value))


def _convert_finished(connection: sqlite3.Connection) -> None:
    query = "SELECT group_index, settings, keys, payload FROM old_finished ORDER BY id"
    for group, settings, keys, payload in _rows(connection, query, "old_finished"):
        with contextlib.suppress(*_DAMAGE):
            for key, value in _finished_samples(json.loads(keys), payload):
                connection.execute(
                    "INSERT INTO ledger_finished (group_index, settings, sample_index, attempt, started, "
                    "version, payload) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (group, settings, *key, codec.encode(value)),
                )


def _finished_samples(keys: list[list[Any]], payload: bytes) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    found: dict[str, Any] = {"fan_out": False, "samples": []}
    pieces = [{**found, "samples": [row]} for row in _unpack_table(payload)] if len(keys) > 1 else []
    for key, piece in zip(keys, pieces or [loads(payload)], strict=True):
        for fields in piece["samples"]:
            spans = fields["version_spans"]
            fields["version_spans"] = [tuple(span) for span in json.loads(spans)] if spans else []
        yield key, piece


def _convert_rollouts(connection: sqlite3.Connection) -> None:
    for rollout, payload in connection.execute("SELECT rollout_id, payload FROM ledger_rollouts").fetchall():
        try:
            data = codec.encode(loads(payload))
            connection.execute("UPDATE ledger_rollouts SET payload = ? WHERE rollout_id = ?", (data, rollout))
        except _DAMAGE:
            connection.execute("DELETE FROM ledger_rollouts WHERE rollout_id = ?", (rollout,))


# -- the former format of values: one letter for the type, then the content


def loads(data: bytes) -> Any:
    """Read a value in the former format. ValueError: the bytes are damaged."""
    try:
        reader = _Reader(data)
        value = reader.value()
    except Exception as error:
        raise ValueError(f"these bytes are damaged ({type(error).__name__}: {error})") from error
    if reader.at != len(data):
        raise ValueError("these bytes are damaged (there are too many)")
    return value


class _Reader:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise IndexError("it ends early")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def blob(self) -> bytes:
        return self.take(self.number("Q"))

    def text(self) -> str:
        return self.blob().decode("utf-8", "surrogatepass")

    def value(self) -> Any:
        return _READERS[self.take(1)](self)

    def entries(self) -> list[Any]:
        return [self.value() for _ in range(self.number("I"))]

    def named(self) -> dict[str, Any]:
        """Read a dict whose scalars are JSON, and whose other values follow with their places."""
        made: dict[str, Any] = json.loads(self.text())
        names = list(made)
        for _ in range(self.number("I")):
            place = self.number("I")
            made[names[place]] = self.value()
        return made

    def groups(self) -> list[Any]:
        ends = np.frombuffer(self.blob(), "<u4").cumsum().tolist()
        rows = _unpack_table(self.blob())
        return [rows[a:b] for a, b in itertools.pairwise([0, *ends])]

    def integers(self) -> np.ndarray[Any, Any]:
        width = self.number("B")
        return np.frombuffer(self.blob(), f"<i{1 << width}")

    def floats(self) -> list[float]:
        width = self.number("B")
        return np.frombuffer(self.blob(), f"<f{width}").astype("<f8").tolist()

    def scalar(self) -> Any:
        dtype = np.dtype(self.text())
        return np.frombuffer(self.blob(), dtype)[0]

    def flat_array(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        if self.take(1) == b"n":
            return self.integers().astype(dtype)
        stored = np.dtype(self.text())
        return np.frombuffer(self.blob(), stored).copy()

    def array(self) -> np.ndarray[Any, Any]:
        dtype = np.dtype(self.text())
        shape = [self.number("q") for _ in range(self.number("B"))]
        return self.flat_array(dtype).reshape(shape)

    def tensor(self) -> Any:
        import torch  # only batches hold tensors

        dtype = getattr(torch, self.text())
        shape = [self.number("q") for _ in range(self.number("B"))]
        try:
            stored = torch.empty(0, dtype=dtype).numpy().dtype
        except TypeError:  # numpy has no bfloat16
            stored = np.dtype("<u1")
        values = self.flat_array(stored)
        return (torch.from_numpy(values).view(dtype) if len(values) else torch.empty(0, dtype=dtype)).reshape(
            shape
        )

    def rows(self) -> list[Any]:
        lengths = self.value()
        return [row.clone() for row in self.value().split(lengths)]


_READERS: dict[bytes, Callable[[_Reader], Any]] = {
    b"N": lambda r: None,
    b"1": lambda r: True,
    b"0": lambda r: False,
    b"I": lambda r: r.number("q"),
    b"J": lambda r: int(r.text()),
    b"D": lambda r: r.number("d"),
    b"S": _Reader.text,
    b"B": _Reader.blob,
    b"L": _Reader.entries,
    b"U": lambda r: tuple(r.entries()),
    b"E": lambda r: set(r.entries()),
    b"M": lambda r: dict([(r.value(), r.value()) for _ in range(r.number("I"))]),
    b"O": _Reader.named,
    b"T": lambda r: json.loads(r.text()),
    b"C": _Reader.rows,
    b"g": _Reader.groups,
    b"t": lambda r: _unpack_table(r.blob()),
    b"i": lambda r: r.integers().tolist(),
    b"f": _Reader.floats,
    b"G": _Reader.scalar,
    b"A": _Reader.array,
    b"X": _Reader.tensor,
}


def _unpack_table(data: bytes) -> list[dict[str, Any]]:
    """Read dicts that have the same names: a header in JSON, then the numbers of their lists."""
    (size,) = struct.unpack_from("<I", data)
    header, at = json.loads(data[4 : 4 + size].decode("utf-8", "surrogatepass")), 4 + size
    columns = []
    for kind, value in header["columns"]:
        if kind == "=":
            values = [value] * header["count"]
        elif kind in ("", "("):
            values = value if kind == "" else [list(map(tuple, entry)) for entry in value]
        else:
            values, at = _cut(data, at, _DTYPES[kind], value)
        columns.append(values)
    return [dict(zip(header["names"], row, strict=True)) for row in zip(*columns, strict=True)]


_DTYPES = {"B": "<u1", "H": "<u2", "I": "<u4", "q": "<i8", "f": "<f4", "d": "<f8"}
