"""Limits put into sympy inside check workers: whatever a parser made of an answer, no number grows unbounded.

One multiplication of two giant integers is a single C call, which nothing interrupts but the end of the
process. So powers and factorials are refused before they are worked out. Only `math_check` installs this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sympy
from sympy.core import numbers
from sympy.functions.combinatorial import factorials

from slime.rollout.rm_hub.workers.limits import MAX_FACTORIAL, check_power, refuse


def limit_sympy() -> None:
    """Bound powers and factorials for the life of the process; calling it again changes nothing."""
    for kind in (numbers.Rational, numbers.Integer):
        kind._eval_power = _guarded(kind._eval_power, _check_rational_power)
    for kind in (factorials.factorial, factorials.factorial2, factorials.subfactorial, sympy.gamma):
        kind.eval = classmethod(_guarded(kind.eval.__func__, _check_factorial))
    for kind in (factorials.RisingFactorial, factorials.FallingFactorial, factorials.binomial):
        kind.eval = classmethod(_guarded(kind.eval.__func__, _check_two_numbers))


def _guarded(original: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    if hasattr(original, "slime_guarded"):
        return original

    @functools.wraps(original)
    def guarded(self: Any, *args: Any) -> Any:
        check(self, *args)
        return original(self, *args)

    vars(guarded)["slime_guarded"] = True
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
