"""A calculator with its own parser and bounds on size, so that no expression hangs it."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated, Any

from slime.agent.tools.registry import ToolError

_MAX_CHARS, _MAX_DIGITS = 1000, 1000
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "log", "log2", "log10", "exp", "sin", "cos", "tan")},
    **{name: getattr(math, name) for name in ("floor", "ceil", "gcd", "lcm")},
    **{"abs": abs, "round": round, "min": min, "max": max},
}
_NAMES = {"pi": math.pi, "e": math.e}


def calculator(expression: Annotated[str, "like (3 + 4) * 2 ** 5, sqrt(2), 17 % 5"]) -> str:
    """The value of an arithmetic expression."""
    return calculate(expression)


calculator.repeatable = True  # type: ignore[attr-defined]


def calculate(expression: str) -> str:
    """Return the value as text: whole numbers in full, others to twelve digits; ToolError: there is none."""
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {_MAX_CHARS} are read")
    try:
        tree = ast.parse(
            expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/"), mode="eval"
        )
        value = _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (OverflowError, ValueError, TypeError) as error:
        raise ToolError(f"{expression!r} has no value: {error}") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and left and math.log10(abs(left)) * abs(right) > _MAX_DIGITS:
            raise ToolError(f"the result has more than {_MAX_DIGITS} digits")
        value = _BINARY[type(node.op)](left, right)
        if isinstance(value, complex):
            raise ToolError("the result is not a real number")
        return _bounded(value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords:
            raise ToolError(f"{node.func.id} takes no named arguments")
        return _bounded(_FUNCTIONS[node.func.id](*map(_value, node.args)))
    known = f"numbers, + - * / // % **, {', '.join([*_NAMES, *_FUNCTIONS])}"
    raise ToolError(f"{ast.unparse(node)[:60]!r} is not supported; use {known}")


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_DIGITS * 4:
        raise ToolError(f"the result has more than {_MAX_DIGITS} digits")
    return value
