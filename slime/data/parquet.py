"""Prompt files that are parquet tables."""

from typing import Any

from slime.data.copies import local_path
from slime.data.prompt_sources import Place, PlacedRows, Row


def read_parquet(source: str) -> PlacedRows:
    """The rows of a table, batch by batch."""
    try:
        import pyarrow.parquet as parquet  # optional dependency: needed only by those who have parquet files
    except ImportError as error:
        raise ValueError(
            f"{source}: reading parquet needs pyarrow; install it with `pip install slime[data]`."
        ) from error
    from pyarrow.lib import ArrowException  # as above

    number = 0
    try:
        with parquet.ParquetFile(local_path(source)) as file:
            _check_columns(source, file.schema_arrow.names)
            for batch in file.iter_batches():
                for row in _batch_rows(source, number, batch):
                    number += 1
                    yield Place(source, "row", number), row
    except (ArrowException, OSError) as error:
        after = f", after row {number}" if number else ""
        raise ValueError(f"{source}{after}: not a readable parquet file ({error}).") from error


def _check_columns(source: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{source}: several columns have the name {twice[0]!r}; keep one of them.")


def _batch_rows(source: str, before: int, batch: Any) -> list[Row]:
    """Return the rows of a batch that follows `before` rows; errors name the row of a bad value."""
    try:
        rows: list[Row] = batch.to_pylist()
        return rows
    except ValueError:
        for i in range(batch.num_rows):
            try:
                batch.slice(i, 1).to_pylist()
            except ValueError as error:  # UnicodeDecodeError is one
                raise ValueError(
                    f"{source}, row {before + i + 1}: a value cannot be read ({error})."
                ) from error
        raise
