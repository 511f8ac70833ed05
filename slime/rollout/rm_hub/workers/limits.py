"""Limits of comparisons, and a record of comparisons that exceeded them.

A comparison beyond its limit is "not equal" for its caller. A check worker must also know that nothing was
compared, so it opens `noting()` around the check. This module is light: check workers import it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NoReturn

MAX_RESPONSE_CHARS = 1_000_000  # a response beyond it is not looked at
MAX_ANSWER_CHARS = 2_000  # a final answer beyond it is compared as text only
MAX_BITS = 40_000  # of a number: about 12,000 digits
MAX_FACTORIAL = 3_000  # whose factorial has about as many digits
MAX_DEPTH = 60  # brackets inside brackets
CPU_BUDGET_S = 1.0  # of a worker for one check; answers that people write take a tenth of it

_notes: ContextVar[list[str] | None] = ContextVar("slime_too_large", default=None)


class TooLarge(ValueError):
    """A value or text that is not worked out because of its size."""


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """Collects why comparisons were given up."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note(reason: str) -> None:
    """A comparison was given up for its size."""
    notes = _notes.get()
    if notes is not None:
        notes.append(reason)


def refuse(reason: str) -> NoReturn:
    """Noted here, since a parser between here and the check may swallow what is raised."""
    note(reason)
    raise TooLarge(reason)


def check_power(base_bits: int, exponent: int) -> None:
    """TooLarge when base ** exponent would have more than MAX_BITS."""
    if base_bits > 1 and base_bits * abs(exponent) > MAX_BITS:
        refuse("a power with too many digits")


def check_text(text: str, *, max_chars: int = MAX_ANSWER_CHARS, max_depth: int = MAX_DEPTH) -> None:
    """TooLarge when the text of an answer is too long or too deeply bracketed for a parser."""
    if len(text) > max_chars:
        refuse(f"an answer of {len(text)} characters")
    depth = deepest = 0
    for char in text:
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(char, 0)
        deepest = max(deepest, depth)
    if deepest > max_depth:
        refuse(f"an answer with {deepest} brackets inside each other")
