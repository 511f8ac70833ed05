"""JSON of whatever a user's function put into a sample: what JSON cannot say is said by its text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

_KEYS = (str, int, float, bool, type(None))


def plain_or_text(value: Any) -> Any:
    """What stands in JSON for a value that it does not know: numbers of numpy are numbers."""
    return value.item() if isinstance(value, np.generic) else str(value)


def storable(text: str) -> str:
    """Half of a surrogate pair, which a tokenizer may leave at a cut, is no text that a file can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def any_json(encode: Callable[[Any], str], value: object) -> str:
    """What `encode` makes of a value; of one that it cannot write, what it makes of the parts that it can.

    Example: {(1, 2): 0.5}, whose key is no text, is written as {"(1, 2)": 0.5}.
    """
    try:
        return encode(value)
    except Exception:  # of JSON's own rules (keys, circles, depth) and of a foreign `__str__`
        return encode(_sayable(value, ()))


def _sayable(value: Any, within: tuple[int, ...]) -> Any:
    """`within`: what it is part of, by their ids."""
    if isinstance(value, (dict, list, tuple)):
        if id(value) in within or len(within) > 100:
            return "..."
        inner = (*within, id(value))
        if isinstance(value, dict):
            return {_key(key): _sayable(item, inner) for key, item in value.items()}
        return [_sayable(item, inner) for item in value]
    try:
        json.dumps(value, default=plain_or_text)
        return value
    except Exception:  # of a user's class, or an integer of thousands of digits
        return f"<{type(value).__qualname__}>"


def _key(key: Any) -> Any:
    if type(key) in _KEYS:
        return key
    try:
        return str(key)
    except Exception:
        return f"<{type(key).__qualname__}>"
