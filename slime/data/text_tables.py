"""Prompt files that are tables of text: csv, tsv, and JSON that is a list."""

import csv
import io
from collections.abc import Iterator

from slime.data.copies import local_path
from slime.data.jsonl import check_encoding, read_jsonl
from slime.data.prompt_sources import Place, PlacedRows
from slime.data.strict_json import parse_json

_MAX_FIELD = 2**28


def read_csv(source: str) -> PlacedRows:
    """The rows under a line of column names; every value is text. A line is named by where its row begins."""
    path = local_path(source)
    csv.field_size_limit(_MAX_FIELD)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        tab = source.lower().partition("?")[0].endswith(".tsv")
        reader = csv.reader(_checked(source, file), delimiter="\t" if tab else ",", strict=True)
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
                columns = _columns(place, fields)
                continue
            if len(fields) != len(columns):
                raise ValueError(
                    f"{place}: {len(fields)} fields, but the table has {len(columns)} columns "
                    f"({', '.join(columns[:20])}); put fields with commas or quotes in quotes."
                )
            yield place, dict(zip(columns, fields, strict=True))


def _checked(source: str, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        check_encoding(Place(source, "line", number), line)
        yield line


def _columns(place: Place, names: list[str]) -> list[str]:
    names = [name.strip() for name in names]
    for position, name in enumerate(names, start=1):
        if not name:
            raise ValueError(f"{place}: column {position} has no name; the first line names the columns.")
        if names.count(name) > 1:
            raise ValueError(f"{place}: several columns have the name {name!r}; keep one of them.")
    return names


def read_json(source: str) -> PlacedRows:
    """The objects of a list; or, where the file begins with an object, one object per line."""
    path = local_path(source)
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        head = file.read(2**16)
        if head.lstrip().startswith("["):
            yield from _listed(source, head + file.read())
            return
    try:
        yield from read_jsonl(source)
    except ValueError as error:
        raise ValueError(f"{error} (A .json file is a list of objects, or one object per line.)") from None


def _listed(source: str, text: str) -> PlacedRows:
    for number, line in enumerate(io.StringIO(text), start=1):
        check_encoding(Place(source, "line", number), line)
    try:
        rows = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}.") from None
    for number, row in enumerate(rows, start=1):
        place = Place(source, "row", number)
        if not isinstance(row, dict):
            raise ValueError(f"{place}: expected an object, found {type(row).__name__}.")
        yield place, row
