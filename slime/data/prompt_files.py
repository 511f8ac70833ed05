"""Readers of prompt files: JSON lines, JSON lists, csv, tsv and parquet."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

from slime.data.copies import local_path
from slime.data.prompt_sources import Place, PlacedRows, Row

_MAX_FIELD = 2**28
_NEAR = 20  # characters shown on either side of a mistake


def read_jsonl(source: str) -> PlacedRows:
    """Yield the rows of a file with one JSON object per line; blank lines are skipped."""
    # Invalid UTF-8 becomes lone surrogates, so that the error can name the line.
    with local_path(source).open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for place, line in _checked(source, file):
            text = line.strip().lstrip("\ufeff")  # files that were joined have byte order marks inside
            if not text:
                continue
            try:
                row = parse_json(text)
            except ValueError as error:
                raise ValueError(f"{place}: {error}; each line must be one JSON object.") from None
            yield place, _object(place, row)


def read_json(source: str) -> PlacedRows:
    """Yield the objects of a list, or one object per line if the file starts with an object."""
    with local_path(source).open(encoding="utf-8-sig", errors="surrogateescape") as file:
        head = file.read(2**16)
        if head.lstrip().startswith("["):
            yield from _listed(source, head + file.read())
            return
    try:
        yield from read_jsonl(source)
    except ValueError as error:
        raise ValueError(f"{error} (A .json file is a list of objects, or one object per line.)") from None


def _listed(source: str, text: str) -> PlacedRows:
    for _ in _checked(source, io.StringIO(text)):
        pass
    try:
        rows = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}.") from None
    for number, row in enumerate(rows, start=1):
        place = Place(source, "row", number)
        yield place, _object(place, row)


def read_csv(source: str) -> PlacedRows:
    """Yield the rows under a line of column names; every value is text. A row's place is its first line."""
    csv.field_size_limit(_MAX_FIELD)
    with local_path(source).open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = (line for _, line in _checked(source, file))
        tab = source.lower().partition("?")[0].endswith(".tsv")
        reader = csv.reader(lines, delimiter="\t" if tab else ",", strict=True)
        begin = 1
        columns: list[str] | None = None
        while True:
            place = Place(source, "line", begin)
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise ValueError(
                    f"{place}: not a table ({error}); quotes inside quotes are doubled."
                ) from None
            if fields is None:
                return
            begin = reader.line_num + 1
            if not any(fields):
                continue  # a blank line
            if columns is None:
                columns = [name.strip() for name in fields]
                _check_columns(place, columns)
                continue
            if len(fields) != len(columns):
                raise ValueError(
                    f"{place}: {len(fields)} fields, but the table has {len(columns)} columns "
                    f"({', '.join(columns[:20])}); put fields with commas or quotes in quotes."
                )
            yield place, dict(zip(columns, fields, strict=True))


def read_parquet(source: str) -> PlacedRows:
    """Yield the rows of a table, batch by batch."""
    try:
        import pyarrow.parquet as parquet  # optional dependency: needed only for parquet files
    except ImportError as error:
        raise ValueError(
            f"{source}: reading parquet needs pyarrow; install it with `pip install slime-rl[data]`."
        ) from error
    from pyarrow.lib import ArrowException  # as above

    number = 0
    try:
        with parquet.ParquetFile(local_path(source)) as file:
            _check_columns(source, file.schema_arrow.names)
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield Place(source, "row", number), row
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        after = f", after row {number}" if number else ""
        raise ValueError(f"{source}{after}: not a readable parquet file ({error}).") from error


def _check_columns(where: object, names: list[str]) -> None:
    for position, name in enumerate(names, start=1):
        if not name:
            raise ValueError(f"{where}: column {position} has no name; the first line names the columns.")
        if names.count(name) > 1:
            raise ValueError(f"{where}: several columns have the name {name!r}; keep one of them.")


def _object(place: Place, row: Any) -> Row:
    if not isinstance(row, dict):
        found = type(row).__name__
        raise ValueError(f'{place}: expected a JSON object, found {found}; write {{"input": "..."}}.')
    return row


def _checked(source: str, lines: Iterable[str]) -> Iterator[tuple[Place, str]]:
    """Yield each line with its place; refuse bytes that are no UTF-8, which were read as lone surrogates."""
    for number, line in enumerate(lines, start=1):
        place = Place(source, "line", number)
        try:
            line.encode()
        except UnicodeEncodeError as error:
            (byte,) = line[error.start].encode(errors="surrogateescape")
            found = f"not UTF-8 text (byte 0x{byte:02x} at column {error.start + 1})"
            raise ValueError(f"{place}: {found}; save the file as UTF-8.") from None
        yield place, line


def parse_json(text: str) -> Any:
    """Read JSON. A ValueError gives the cause; the caller adds the place."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        wrong = error.msg.removesuffix(" at")  # some messages of json end in it
        piece = text[max(0, error.pos - _NEAR) : error.pos + _NEAR].strip()
        near = f", near {piece!r}" if piece else ""
        raise ValueError(f"not valid JSON ({wrong} at column {error.colno}{near})") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
