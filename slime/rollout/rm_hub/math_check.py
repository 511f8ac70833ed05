"""The `math` reward, which only check workers import: boxed answers compared by math-verify."""

from __future__ import annotations

import logging
import re

from math_verify import parse, verify

from slime.rollout.rm_hub.expressions import parse_expression
from slime.rollout.rm_hub.math_utils import common_signs, extract_boxed_answer, grade_answer_mathd
from slime.rollout.rm_hub.workers.limits import TooLarge, check_text, note, refuse
from slime.rollout.rm_hub.workers.patches import limit_sympy

# It warns on every call that timeouts are off; here they are off on purpose.
logging.getLogger("math_verify").setLevel(logging.ERROR)
limit_sympy()

_MAX_CHARS, _MAX_DEPTH = 400, 12  # the LaTeX parser takes seconds beyond them
_MANY_DIGITS = re.compile(r"\d{1000}")
_WHOLE = re.compile(r"\s*-?\d[\d,]*\s*")
_UNEVALUATED = re.compile(r"[\s(]*\d[\d\s()]*+(?:(?:[-+*/÷×]|\\(?:times|cdot|div)(?![a-zA-Z]))[\d\s()]*+)+")
_BIG_EXPONENT = re.compile(r"\d\.?[eE][+-]?\d{4}")


_FORMS = (
    r"\frac{x}{2}+1",
    "x^{y^{2}}",
    r"\sqrt{((2))}",
    r"\sin(\cos(x))",
    r"\{1,2\}",
    "[1,2)",
    "x=3",
    r"5\text{ cm}",
    "|-3|",
)


def warm_up() -> None:
    """Pay for the tables that the first parsing of each form of answer builds."""
    for form in _FORMS:
        check_math(f"\\boxed{{{form}}}", "7y")


def check_math(response: str, label: str) -> int:
    """1 when the last boxed answer of the response equals the label (boxed or bare), else 0."""
    given = extract_boxed_answer(response)
    truth = extract_boxed_answer(label) or label
    if given is None:
        return 0
    if grade_answer_mathd(given, truth):
        return 1
    if _WHOLE.fullmatch(truth) and _UNEVALUATED.fullmatch(given):
        return 0  # the question itself (12*34 for 408)
    given, truth = common_signs(given), common_signs(truth)
    try:
        _check_size(given)
        # No timeouts of its own: they need SIGALRM, and the pool's deadline already bounds this process.
        gold = parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
        answer = parse(f"\\boxed{{{given}}}", parsing_timeout=None)
        return int(verify(gold, answer, timeout_seconds=None))
    except TooLarge:
        return 0
    except (OverflowError, RecursionError) as error:
        note(f"{type(error).__name__}: {error}")
        return 0


def _check_size(text: str) -> None:
    check_text(text, max_chars=_MAX_CHARS, max_depth=_MAX_DEPTH)
    if _MANY_DIGITS.search(text) or _BIG_EXPONENT.search(text):
        refuse("a number with too many digits")
    try:
        parse_expression(text)  # a cheap look: it refuses towers of powers before the LaTeX parser meets them
    except TooLarge:
        raise
    except (ValueError, TypeError, ArithmeticError):
        return  # not of the kind that it reads
