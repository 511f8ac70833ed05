"""Prompt files of one JSON object per line."""

import itertools
from collections.abc import Iterator
from typing import TextIO

from slime.data.copies import local_path
from slime.data.prompt_sources import Place, PlacedRows, Row
from slime.data.strict_json import parse_json

_MAX_LINE_CHARACTERS = 2**28


def read_jsonl(source: str) -> PlacedRows:
    """The rows of a file; blank lines are skipped."""
    path = local_path(source)
    # Bytes that are no UTF-8 become lone surrogates, so that they are found in their line.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(_lines(source, file), start=1):
            place = Place(source, "line", number)
            check_encoding(place, line)
            text = line.strip().lstrip("\ufeff")  # files that were joined have byte order marks inside
            if text:
                yield place, _parse_line(place, text)


def _lines(source: str, file: TextIO) -> Iterator[str]:
    for number in itertools.count(1):
        line = file.readline(_MAX_LINE_CHARACTERS)
        if len(line) == _MAX_LINE_CHARACTERS:
            found = f"{source}, line {number}: longer than {_MAX_LINE_CHARACTERS} characters"
            raise ValueError(f"{found}; write one JSON object per line.")
        if not line:
            return
        yield line


def _parse_line(place: Place, line: str) -> Row:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{place}: {error}; each line must be one JSON object.") from None
    if not isinstance(row, dict):
        found = type(row).__name__
        raise ValueError(f'{place}: expected a JSON object, found {found}; write {{"input": "..."}}.')
    return row


def check_encoding(place: Place, line: str) -> None:
    """Refuse a line with bytes that are no UTF-8, which were read as lone surrogates."""
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
