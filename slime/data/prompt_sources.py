"""Reads prompts from one source or several, in any format, whole or as a `path@[a:b]` slice of rows."""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments.groups.run import files_of_words
from slime.catalog.datasets import format_of, is_url, why_unreadable
from slime.utils.misc import load_function

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<end>-?\d*)\]$")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a row, for messages; lines and rows count from 1, blank lines included."""

    path: str
    unit: str  # line or row
    number: int

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"


PlacedRows = Iterator[tuple[Place, Row]]


def parse_slice(spec: str) -> tuple[str, int | None, int | None]:
    """Parse `data.jsonl@[10:-5]` into ("data.jsonl", 10, -5); a bound that is not written is None."""
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
    """Yield the rows of one or several files, in order."""
    return (row for _, row in read_rows(spec))


def read_rows(spec: str | Iterable[str]) -> PlacedRows:
    """Yields each row with its place in the file, whatever slice of it is read."""
    for path in files_of_words(spec if isinstance(spec, str) else list(spec)):
        yield from _read_one(path)


def _read_one(spec: str) -> PlacedRows:
    name, start, end = parse_slice(spec)
    reason, fmt = why_unreadable(name), format_of(name)
    if reason is not None or fmt is None:
        there = is_url(name) or Path(name).expanduser().exists()
        raise (ValueError if there else FileNotFoundError)(f"prompt file {name}: {reason}.")
    rows: PlacedRows = load_function(fmt.reader)(name)
    if start is None and end is None:
        return rows
    if (start or 0) >= 0 and (end is None or end >= 0):
        return itertools.islice(rows, start, end)
    return iter(list(rows)[start:end])
