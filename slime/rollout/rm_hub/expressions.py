"""Reads short LaTeX or plain-text expressions into sympy without ever evaluating text as code.

Covers arithmetic, fractions, roots, powers, percentages, the usual functions, pi and one-letter symbols.
Anything else is a ValueError, which graders treat as "not comparable".
"""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.rm_hub.workers.limits import TooLarge, check_power, note, refuse

_MAX_LENGTH = 400
_MAX_EXPONENT = 10_000
_MAX_TOWER = 4
_MAX_SUM_EXPONENT = 60  # to compare it, sympy multiplies it out
_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+\.\d*|\.\d+|\d+|[a-zA-Z]|\*\*|\S")
_WORDS = re.compile(r"(?<![a-zA-Z\\])(sqrt|sin|cos|tan|ln|log|exp|pi)(?![a-zA-Z])")
_NOISE = re.compile(r"\\left|\\right|\\displaystyle|\\limits|\\[!,;: ]|[$~]|\^\{?\\circ\}?|\\degree")
_REPLACEMENTS = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cdot": "*",
    "\\times": "*",
    "\\div": "/",
    "\\%": "%",
    "−": "-",
    "×": "*",
    "÷": "/",
    "π": "\\pi",
    "√": "\\sqrt",
    "**": "^",
}
_FUNCTIONS = {"\\sin": "sin", "\\cos": "cos", "\\tan": "tan", "\\ln": "log", "\\log": "log", "\\exp": "exp"}
_CLOSING = {"(": ")", "{": "}", "[": "]"}


def parse_expression(text: str) -> Any:
    """The sympy expression that `text` writes down; ValueError when it is none that we read."""
    parser = _Parser(_tokenize(text))
    value = parser.sum()
    if parser.peek() is not None:
        raise ValueError(f"unexpected {parser.peek()!r} in {text!r}")
    return value


def warm_up() -> None:
    """Pay for what the first comparison imports: a check worker does it before a check's time counts."""
    expressions_equal(r"\frac{x}{2}+1", "x")


def expressions_equal(left: str, right: str) -> bool:
    """Return whether two texts have the same value; an expression too large to evaluate equals nothing."""
    import sympy  # here, not above: only the grading of expressions pays for it

    try:
        difference = parse_expression(left) - parse_expression(right)
        return sympy.simplify(difference) == 0
    except TooLarge:
        return False
    except (OverflowError, RecursionError) as error:
        note(f"{type(error).__name__}: {error}")
        return False
    except (ValueError, TypeError, ArithmeticError, sympy.SympifyError):
        return False


def _tokenize(text: str) -> list[str]:
    if len(text) > _MAX_LENGTH:
        refuse(f"an expression of {len(text)} characters, more than {_MAX_LENGTH}")
    text = _NOISE.sub("", text)
    for old, new in _REPLACEMENTS.items():
        text = text.replace(old, new)
    text = _WORDS.sub(r"\\\1", text)
    # A mixed number is a sum: 2 3/4 and 2\frac{3}{4}.
    text = re.sub(r"(?<![\d./^])(\d+)\s+(\d+/\d+)", r"(\1+\2)", text)
    text = re.sub(r"(?<![\d.^])(\d+)\s*(\\frac\{\d+\}\{\d+\})", r"(\1+\2)", text)
    tokens = _TOKEN.findall(text)
    if not tokens:
        raise ValueError("empty expression")
    return tokens


class _Parser:
    """Recursive descent: sum > product > sign > power > atom."""

    def __init__(self, tokens: list[str]):
        import sympy  # here, not above: only the grading of expressions pays for it

        self._sympy = sympy
        self._tokens = tokens
        self._at = 0
        self._floors = 0  # powers in whose exponent we are

    def peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if token is None or (expected is not None and token != expected):
            raise ValueError(f"expected {expected or 'more'}, found {token!r}")
        self._at += 1
        return token

    def sum(self) -> Any:
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> Any:
        value = self.signed()
        while (token := self.peek()) is not None and token not in ("+", "-", ")", "}", "]", ",", "=", "|"):
            if token == "/":
                self.take()
                value = value / self._nonzero(self.signed())
            else:
                if token == "*":
                    self.take()
                value = value * self.signed()
        return value

    def signed(self) -> Any:
        if self.peek() in ("+", "-"):
            return -self.signed() if self.take() == "-" else self.signed()
        return self.power()

    def power(self) -> Any:
        value = self.atom()
        while self.peek() == "%":
            self.take()
            value = value / 100
        if self.peek() == "^":
            self.take()
            self._floors += 1
            if self._floors > _MAX_TOWER:
                refuse(f"a tower of more than {_MAX_TOWER} powers")
            value = self._raised(value, self.signed())
            self._floors -= 1
        return value

    def _raised(self, base: Any, exponent: Any) -> Any:
        if exponent.is_number and abs(exponent) > _MAX_EXPONENT:
            refuse(f"a power with an exponent above {_MAX_EXPONENT}")
        if base.is_Add and exponent.is_number and abs(exponent) > _MAX_SUM_EXPONENT:
            refuse(f"a power of a sum with an exponent above {_MAX_SUM_EXPONENT}")
        if base.is_Rational and exponent.is_Rational:
            check_power(max(abs(base.p).bit_length(), base.q.bit_length()), int(abs(exponent)) + 1)
        return base**exponent

    def atom(self) -> Any:
        token = self.take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return self._sympy.Rational(token)
        if token in _CLOSING:
            value = self.sum()
            self.take(_CLOSING[token])
            return value
        if token == "\\pi":
            return self._sympy.pi
        if token == "\\infty":
            return self._sympy.oo
        if token == "\\frac":
            return self.argument() / self._nonzero(self.argument())
        if token == "\\sqrt":
            degree = self._nonzero(self.atom()) if self.peek() == "[" else self._sympy.Integer(2)
            return self.argument() ** (1 / degree)
        if token in _FUNCTIONS:
            return getattr(self._sympy, _FUNCTIONS[token])(self.argument())
        if len(token) == 1 and token.isascii() and token.isalpha():
            return self._sympy.Symbol(token)
        raise ValueError(f"unexpected {token!r}")

    def argument(self) -> Any:
        """Parse the argument of a command: a group, or one token (\\frac12 is one half)."""
        token = self.peek()
        if token is not None and token.isdigit() and len(token) > 1:
            self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
        return self.atom()

    def _nonzero(self, value: Any) -> Any:
        if value == 0:
            raise ValueError("division by zero")
        return value
