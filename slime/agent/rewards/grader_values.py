"""Encodes values of built-in types for the pipe between the grader and the process of the program.

The text of this file is sent to the sandbox before `grader.py` and `grader_worker.py`, so it uses only the
standard library of Python >= 3.8. Only content of built-in types arrives: an object of the program, with
methods of its own, never reaches the grader.
"""

from __future__ import annotations

import importlib
import json
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LONGEST_FRAME = 1 << 25
_SEQUENCES: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# Types of the standard library that travel by what they are made of.
_MADE = {
    ("collections", "Counter"): lambda value: [dict(value)],
    ("collections", "OrderedDict"): lambda value: [list(value.items())],
    ("collections", "deque"): lambda value: [list(value)],
    ("fractions", "Fraction"): lambda value: [value.numerator, value.denominator],
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("datetime", "date"): lambda value: value.__reduce__()[1],
    ("datetime", "time"): lambda value: value.__reduce__()[1],
    ("datetime", "datetime"): lambda value: value.__reduce__()[1],
    ("datetime", "timedelta"): lambda value: value.__reduce__()[1],
}


def encode(value: Any, other: Callable[[Any], list[Any]]) -> Any:
    """Return a value as JSON. A subclass of a built-in type becomes that type; `other` encodes the rest."""
    if value is None or value is True or value is False:
        return value
    made = _MADE.get((type(value).__module__, type(value).__name__))
    if made is not None and not isinstance(value, type):
        return ["made", type(value).__module__, type(value).__name__, [encode(x, other) for x in made(value)]]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", hex(int.__index__(value))]  # decimal digits have a limit
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, dict):
        return ["dict", [[encode(k, other), encode(v, other)] for k, v in dict.items(value)]]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            items = [encode(item, other) for item in kind.__iter__(value)]
            fields = getattr(value, "_fields", None)
            if name == "tuple" and type(fields) is tuple:
                return ["named", type(value).__name__, list(fields), items]
            return [name, items]
    return other(value)


def decode(text: Any, other: Callable[[list[Any]], Any]) -> Any:
    """Return the value of `encode`. `other` decodes what is no plain value."""
    if not isinstance(text, list):
        return text
    tag, *rest = text
    if tag == "int":
        return int(rest[0], 16)
    if tag == "complex":
        return complex(*rest)
    if tag in ("bytes", "bytearray"):
        return (bytes if tag == "bytes" else bytearray).fromhex(rest[0])
    if tag == "range":
        return range(*rest)
    if tag == "dict":
        return {decode(key, other): decode(value, other) for key, value in rest[0]}
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode(item, other) for item in rest[0])
    if tag == "named":
        import collections

        return collections.namedtuple(rest[0], rest[1])(*(decode(item, other) for item in rest[2]))
    if tag == "made" and (rest[0], rest[1]) in _MADE:
        kind = getattr(importlib.import_module(rest[0]), rest[1])
        return kind(*(decode(item, other) for item in rest[2]))
    return other(text)


def send(fd: int, message: list[Any]) -> None:
    text = json.dumps(message).encode()
    view = memoryview(struct.pack(">I", len(text)) + text)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int, wait: Callable[[], None]) -> list[Any]:
    """Return the next message; EOFError at the end of the pipe, ValueError for what is no message."""

    def exactly(size: int) -> bytes:
        parts = []
        while size > 0:
            wait()
            data = os.read(fd, min(size, 1 << 16))
            if not data:
                raise EOFError
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    (size,) = struct.unpack(">I", exactly(4))
    if size > LONGEST_FRAME:
        raise ValueError("the message is too long")
    message = json.loads(exactly(size))
    if not isinstance(message, list) or not message:
        raise ValueError("a message is a list")
    return message
