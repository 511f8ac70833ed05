"""Checks requests of clients against a description of their fields.

A shape is a type (`float` takes whole numbers too), `{"name": shape, "optional?": shape}`, `[shape]` for a
list, a tuple of alternatives, a set of words, a pattern for text, a `Number`, `Kinds`, or None for a field
that must be absent. Fields that a shape does not name are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.agent.adapters.client_errors import invalid

_NAMES = {
    str: "text",
    float: "a number",
    int: "an integer",
    bool: "a boolean",
    dict: "an object",
    list: "a list",
}
SOME_TEXT = re.compile(".+", re.DOTALL)
FUNCTION = {"name": re.compile(r"[a-zA-Z0-9_-]{1,128}"), "description?": str, "parameters?": dict}


@dataclass(frozen=True, slots=True)
class Number:
    """A number from `low` to `high`."""

    low: float
    high: float = 2**63 - 1
    kind: type = int


COUNT = Number(1)


@dataclass(frozen=True, slots=True)
class Kinds:
    """An object whose shape depends on its field `key`; of `others` nothing more is checked."""

    key: str
    shapes: Mapping[str, Any]
    default: str | None = None  # where the field is absent
    others: re.Pattern[str] | None = None


def check(value: Any, shape: Any, name: str = "") -> None:
    """Raise the error for a client where `value` has not this shape."""
    match shape:
        case dict():
            _check_type(value, dict, name)
            for key, inner in shape.items():
                found = value.get(key.removesuffix("?"))
                if found is not None or not key.endswith("?"):
                    check(found, inner, f"{name}.{key}".strip(".?"))
        case list():
            _check_type(value, list, name)
            for place, one in enumerate(value):
                check(one, shape[0], f"{name}[{place}]")
        case tuple():
            chosen = next((one for one in shape if isinstance(value, _type_of(one))), shape[-1])
            check(value, chosen, name)
        case Kinds():
            _check_type(value, dict, name)
            kind: Any = value[shape.key] if value.get(shape.key) is not None else shape.default
            if isinstance(kind, str) and kind not in shape.shapes and shape.others is not None:
                check(kind, shape.others, f"{name}.{shape.key}")
            else:
                check(kind, shape.shapes.keys(), f"{name}.{shape.key}")
                check(value, shape.shapes[kind], name)
        case Number():
            _check_type(value, shape.kind, name)
            if not shape.low <= value <= shape.high:
                raise invalid(f"Invalid '{name}': {value} is not between {shape.low} and {shape.high}.", name)
        case re.Pattern():
            _check_type(value, str, name)
            if not shape.fullmatch(value):
                raise invalid(f"Invalid '{name}': {value!r} does not match '{shape.pattern}'.", name)
        case type():
            _check_type(value, shape, name)
        case None:
            raise invalid(f"'{name}' is not supported.", name)
        case words:
            if not isinstance(value, str) or value not in words:
                message = f"Invalid value: {value!r}. Supported values are: {', '.join(words)}."
                raise invalid(message, name)


def _type_of(shape: Any) -> type:
    kind = shape if isinstance(shape, type) else type(shape)
    return str if kind is re.Pattern else kind


def _check_type(value: Any, kind: type, name: str) -> None:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        message = f"Invalid type for '{name}': expected {_NAMES[kind]}, got {type(value).__name__}."
        raise invalid(message, name)
