"""Limits of comparisons, and the reason why the last comparison was given up.

A comparison beyond its limit returns "not equal". A check worker must also know that nothing was compared, so
it reads the noted reason after each check. This module must stay light: check workers import it.
"""

from __future__ import annotations

from typing import NoReturn

MAX_RESPONSE_CHARS = 1_000_000  # a longer response is not compared
MAX_ANSWER_CHARS = 2_000  # a final answer beyond it is compared as text only
MAX_BITS = 40_000  # of a number: about 12,000 digits
MAX_FACTORIAL = 3_000  # whose factorial has about as many digits
MAX_DEPTH = 60  # brackets inside brackets
CPU_BUDGET_S = 1.0  # of a worker for one check; answers that people write take a tenth of it

_note: str | None = None


class TooLarge(ValueError):
    """Raised for a value or text that is too large to evaluate."""


def note(reason: str) -> None:
    """Note that a comparison was given up for its size."""
    global _note
    _note = reason


def take_note() -> str | None:
    """Return why the last comparison since the previous call was given up; None: all were made."""
    global _note
    taken, _note = _note, None
    return taken


def refuse(reason: str) -> NoReturn:
    """Raise TooLarge, and note it: a parser between here and the check may swallow the error."""
    note(reason)
    raise TooLarge(reason)


def check_power(base_bits: int, exponent: int) -> None:
    """Raise TooLarge if base ** exponent would have more than MAX_BITS."""
    if base_bits > 1 and base_bits * abs(exponent) > MAX_BITS:
        refuse("a power with too many digits")


def check_text(text: str, *, max_chars: int = MAX_ANSWER_CHARS, max_depth: int = MAX_DEPTH) -> None:
    """Raise TooLarge if the text of an answer is too long or too deeply bracketed for a parser."""
    if len(text) > max_chars:
        refuse(f"an answer of {len(text)} characters")
    depth = deepest = 0
    for char in text:
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(char, 0)
        deepest = max(deepest, depth)
    if deepest > max_depth:
        refuse(f"an answer with {deepest} brackets inside each other")
