"""Finds what a pickle would import, without importing or running any of it.

The `.metadata` of a checkpoint in torch's distributed format is a pickle, which torch loads without a check:
it could run code in every process that loads the checkpoint. So slime checks it first.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Container
from typing import Any

_ATTRIBUTE = ("builtins", "getattr")


class _StandIn:
    """Placeholder for any class: accepts any arguments, state, entries or items."""

    def __init__(self, *args: Any, **named: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def add(self, value: Any) -> None: ...


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, kinds: Container[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(data))
        self.names: set[tuple[str, str]] = set()
        self._kinds = kinds

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _ATTRIBUTE:
            return self._attribute
        self.names.add((module, name))
        return type(name, (_StandIn,), {"place": (module, name)})

    def _attribute(self, of: Any, name: Any = "", *default: Any) -> Any:
        """Handle `getattr`, by which early releases of Python 3.11 pickle a member of an enumeration."""
        member = not default and isinstance(name, str) and name.isupper()
        if not member or getattr(of, "place", None) not in self._kinds:
            self.names.add(_ATTRIBUTE)
        return _StandIn()

    def persistent_load(self, pid: Any) -> Any:
        return _StandIn()


def foreign_name(
    data: bytes, allowed: Container[tuple[str, str]], kinds: Container[tuple[str, str]] = ()
) -> str | None:
    """Return the first `module.name` that is not allowed; None: there is none. ValueError: it is not a
    complete pickle.

    Members of the enumerations `kinds` may be looked up by name.
    """
    reader = _Reader(data, kinds)
    try:
        reader.load()
    except Exception as error:  # a truncated pickle raises errors of any kind
        raise ValueError(f"it is not a complete pickle ({type(error).__name__}: {error})") from None
    return min((f"{m}.{n}" for m, n in reader.names if (m, n) not in allowed), default=None)
