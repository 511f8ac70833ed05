"""Recognises the dialect of the protocol that a server speaks, from its server info."""

from collections.abc import Mapping
from typing import Any

from slime.catalog.engines import ENGINES, UNNAMED_ENGINE, Dialect


def version_tuple(version: str) -> tuple[int, ...]:
    """`"0.5.23.post1"` -> `(0, 5, 23)`; stops at the first part that is not a number."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def dialect_of(server_info: Mapping[str, Any]) -> Dialect:
    """Our own engines name their kind; everything else that answers the protocol is taken for SGLang."""
    kind = ENGINES.get(str(server_info.get("engine")), ENGINES[UNNAMED_ENGINE])
    version = version_tuple(str(server_info.get("version", "")))
    older = (dialect for before, dialect in kind.older_dialects if version and version < before)
    return next(older, kind.dialect)
