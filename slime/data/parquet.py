"""Prompt files that are parquet tables."""

from pathlib import Path
from typing import Any

from slime.data.reader import Place, PlacedRows, Row


def read_parquet(path: Path) -> PlacedRows:
    """The rows of a table, batch by batch."""
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
    """The rows of a batch that begins after `before` rows; an unreadable value is told with its row."""
    try:
        rows: list[Row] = batch.to_pylist()
        return rows
    except ValueError:
        for i in range(batch.num_rows):
            try:
                batch.slice(i, 1).to_pylist()
            except ValueError as error:  # UnicodeDecodeError is one
                raise ValueError(
                    f"{path}, row {before + i + 1}: a value cannot be read ({error})."
                ) from error
        raise
