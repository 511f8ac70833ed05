"""Lines of metrics.jsonl read back. A disk that failed, or was full, may have left half of one anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def whole_rows(lines: Iterable[bytes]) -> list[Row]:
    """The objects of lines that are whole; not one that is being written, nor what no writer wrote."""
    parsed = (_parsed(line) for line in lines if line.endswith(b"\n"))
    return [row for row in parsed if isinstance(row, dict)]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # also of bytes that are no text
        return None
