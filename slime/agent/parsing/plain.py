"""No tool calls: everything is text."""

from collections.abc import Mapping
from typing import Any

# What every format's function returns: the text, the calls, and whether one cannot be read.
Read = tuple[str, list[dict[str, Any]], bool]


def parse_plain(text: str, schemas: Mapping[str, Any]) -> Read:
    return text, [], False
