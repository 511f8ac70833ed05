"""Read prompt files: jsonl and parquet, one or several, whole or as a `path@[a:b]` slice of rows."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<end>-?\d*)\]$")

Row = dict[str, Any]


def split_paths(spec: str | Iterable[str]) -> list[str]:
    """Several files as a list, or as one string with commas (a path that exists with a comma in it stays whole)."""
    if not isinstance(spec, str):
        return [path for one in spec for path in split_paths(one)]
    if Path(parse_slice(spec)[0]).exists():
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
    for path in split_paths(spec):
        yield from _read_one(path)


def _read_one(spec: str) -> Iterator[Row]:
    name, start, end = parse_slice(spec)
    path = Path(name)
    if not path.exists():
        raise FileNotFoundError(f"prompt file {name} does not exist (working directory: {Path.cwd()}).")
    if path.is_dir():
        raise ValueError(f"prompt file {name} is a folder; name a .jsonl or .parquet file in it.")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        hint = (
            " A .json file holds one value; write one JSON object per line instead." if path.suffix == ".json" else ""
        )
        raise ValueError(f"prompt file {name} ends in '{path.suffix}': only .jsonl and .parquet are read.{hint}")
    rows = readers[path.suffix](path)
    if start is None and end is None:
        return rows
    if (start or 0) >= 0 and (end is None or end >= 0):
        return itertools.islice(rows, start, end)
    return iter(list(rows)[start:end])


def _read_jsonl(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(path, number, line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {number}: not UTF-8 text ({error}).") from error


def _parse_line(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno}).") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}.")
    return row


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet  # optional dependency: needed only by those who have parquet files
    except ImportError as error:
        raise ValueError(
            f"{path}: reading parquet needs pyarrow; install it with `pip install slime[data]`."
        ) from error
    from pyarrow.lib import ArrowInvalid  # as above

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a readable parquet file ({error}).") from error
