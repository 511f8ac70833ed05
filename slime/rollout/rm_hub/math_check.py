"""The `math` reward, which only check workers import: boxed answers compared by math-verify."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import sympy
from math_verify import parse, verify
from sympy.core import numbers
from sympy.functions.combinatorial import factorials

from slime.rollout.rm_hub.expressions import parse_expression
from slime.rollout.rm_hub.math_utils import common_signs, extract_boxed_answer, grade_answer_mathd
from slime.rollout.rm_hub.workers.limits import MAX_FACTORIAL, TooLarge, check_power, check_text, note, refuse

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


def limit_sympy() -> None:
    """Refuse powers and factorials of numbers that nothing could interrupt, for the life of the process.

    One multiplication of two giant integers is a single C call, which only the end of the process interrupts.
    """
    for kind in (numbers.Rational, numbers.Integer):
        kind._eval_power = _guarded(kind._eval_power, _check_rational_power)
    for kind in (factorials.factorial, factorials.factorial2, factorials.subfactorial, sympy.gamma):
        kind.eval = classmethod(_guarded(kind.eval.__func__, _check_factorial))
    for kind in (factorials.RisingFactorial, factorials.FallingFactorial, factorials.binomial):
        kind.eval = classmethod(_guarded(kind.eval.__func__, _check_two_numbers))


def _guarded(original: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(self: Any, *args: Any) -> Any:
        check(self, *args)
        return original(self, *args)

    return guarded


def _check_rational_power(base: Any, exponent: Any, *rest: Any) -> None:
    if isinstance(exponent, numbers.Rational):
        check_power(max(abs(base.p).bit_length(), base.q.bit_length()), abs(exponent.p) // exponent.q + 1)


def _check_factorial(kind: Any, number: Any, *rest: Any) -> None:
    if isinstance(number, numbers.Number) and abs(number) > MAX_FACTORIAL:
        refuse(f"a factorial of a number above {MAX_FACTORIAL}")


def _check_two_numbers(kind: Any, first: Any, second: Any, *rest: Any) -> None:
    if all(isinstance(number, numbers.Number) and abs(number) > MAX_FACTORIAL for number in (first, second)):
        refuse(f"a binomial or factorial product of numbers above {MAX_FACTORIAL}")


# It warns on every call that timeouts are off; here they are off on purpose.
logging.getLogger("math_verify").setLevel(logging.ERROR)
limit_sympy()


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
