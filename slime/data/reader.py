"""Read prompt files: jsonl and parquet, one or several, whole or as a `path@[a:b]` slice of rows."""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from slime.data.strict_json import parse_json
from slime.utils.prompt_files import why_unreadable

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<end>-?\d*)\]$")
_MAX_LINE_CHARACTERS = 2**28

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands, for messages: lines of a jsonl file count from 1
    with blank ones, rows of others likewise.
    """

    path: str
    unit: str  # line or row
    number: int

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"


PlacedRows = Iterator[tuple[Place, Row]]


def split_paths(spec: str | Iterable[str]) -> list[str]:
    """Several files as a list, or as one string with commas (a path
    that exists with a comma in it stays whole).
    """
    if not isinstance(spec, str):
        return [path for one in spec for path in split_paths(one)]
    if Path(parse_slice(spec)[0]).expanduser().exists():
        return [spec]
    return [part.strip() for part in spec.split(",") if part.strip()]


def parse_slice(spec: str) -> tuple[str, int | None, int | None]:
    """`data.jsonl@[10:-5]` -> ("data.jsonl", 10, -5); a bound that is not written is None."""
    match = _SLICE.match(spec)
    if match is None:
        if re.search(r"@\[.*\]$", spec):
            raise ValueError(
                f"{spec}: the rows after '@' must look like [start:end] with whole numbers, e.g. @[0:100]."
            )
        return spec, None, None
    start, end = match["start"], match["end"]
    if "-" in (start, end):
        raise ValueError(f"{spec}: '-' alone is not a row number; write e.g. @[0:-10].")
    return match["path"], int(start) if start else None, int(end) if end else None


def read_file(spec: str | Iterable[str]) -> Iterator[Row]:
    """Rows of one or several files, in order."""
    return (row for _, row in read_rows(spec))


def read_rows(spec: str | Iterable[str]) -> PlacedRows:
    """The same with the place of each row in its file, whatever slice of it is read."""
    for path in split_paths(spec):
        yield from _read_one(path)


def _read_one(spec: str) -> PlacedRows:
    name, start, end = parse_slice(spec)
    path = Path(name).expanduser()
    reason = why_unreadable(path)
    if reason is not None:
        error = ValueError if path.exists() else FileNotFoundError
        raise error(f"prompt file {name}: {reason}.")
    rows = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    if start is None and end is None:
        return rows
    if (start or 0) >= 0 and (end is None or end >= 0):
        return itertools.islice(rows, start, end)
    return iter(list(rows)[start:end])


def _read_jsonl(path: Path) -> PlacedRows:
    # Bytes that are no UTF-8 become lone surrogates, so that they are found in
    # their line and not in the block around it.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(_lines(path, file), start=1):
            place = Place(str(path), "line", number)
            _check_encoding(place, line)
            text = line.strip().lstrip(
                "\ufeff"
            )  # a file that was joined from several has byte order marks inside
            if text:
                yield place, _parse_line(place, text)


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    for number in itertools.count(1):
        line = file.readline(_MAX_LINE_CHARACTERS)
        if len(line) == _MAX_LINE_CHARACTERS:
            raise ValueError(
                f"{path}, line {number}: longer than {_MAX_LINE_CHARACTERS} characters; write one JSON "
                "object per line."
            )
        if not line:
            return
        yield line


def _parse_line(place: Place, line: str) -> Row:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{place}: {error}; each line must be one JSON object.") from None
    if not isinstance(row, dict):
        raise ValueError(
            f'{place}: expected a JSON object, found {type(row).__name__}; write {{"input": "..."}} on each '
            "line."
        )
    return row


def _check_encoding(place: Place, line: str) -> None:
    if line.isascii():
        return
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raw = line[error.start : error.start + 4].encode(errors="surrogateescape")
        hint = "save the file as UTF-8"
        if place.number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            hint = "it looks like UTF-16: " + hint
        if line.startswith("\x1f\udc8b"):
            hint = "it is a gzip file: unpack it first"
        raise ValueError(
            f"{place}: not UTF-8 text (byte 0x{raw[0]:02x} at column {error.start + 1}); {hint}."
        ) from None


def _read_parquet(path: Path) -> PlacedRows:
    try:
        import pyarrow.parquet as parquet  # optional dependency: needed only by those who have parquet files
    except ImportError as error:
        raise ValueError(
            f"{path}: reading parquet needs pyarrow; install it with `pip install slime[data]`."
        ) from error
    from pyarrow.lib import ArrowException  # as above

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names)
            for batch in file.iter_batches():
                for row in _batch_rows(path, number, batch):
                    number += 1
                    yield Place(str(path), "row", number), row
    except (ArrowException, OSError) as error:
        after = f", after row {number}" if number else ""
        raise ValueError(f"{path}{after}: not a readable parquet file ({error}).") from error


def _check_columns(path: Path, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: several columns have the name {twice[0]!r}; keep one of them.")


def _batch_rows(path: Path, before: int, batch: Any) -> list[Row]:
    """`before`: how many rows stand before this batch. One by one where a
    value has no Python form, to name its row.
    """
    try:
        return batch.to_pylist()
    except ValueError:
        for i in range(batch.num_rows):
            try:
                batch.slice(i, 1).to_pylist()
            except ValueError as error:  # UnicodeDecodeError is one
                raise ValueError(
                    f"{path}, row {before + i + 1}: a value cannot be read ({error})."
                ) from error
        raise
