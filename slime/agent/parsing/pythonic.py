"""Calls in Python's own words: `[add(a=1, b=2), look(at="it")]`. Nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from slime.agent.parsing.plain import Read

_START, _END = "<|python_start|>", "<|python_end|>"


def parse_pythonic(text: str, schemas: Mapping[str, Any]) -> Read:
    """The whole answer is a list of calls whose arguments are literals with names."""
    body = text.strip().removeprefix(_START).removesuffix(_END).strip()
    if not body.startswith("["):
        return text, [], False
    begun = any(body.startswith(f"[{name}(") for name in schemas)
    try:
        tree = ast.parse(body, mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError("not a list of calls")
        uses = [_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text, [], begun
    return ("", uses, False) if uses else (text, [], False)


def _call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    names = [keyword.arg for keyword in node.keywords]
    if None in names:
        raise ValueError("arguments have names")
    values = [ast.literal_eval(keyword.value) for keyword in node.keywords]
    return {"name": ast.unparse(node.func), "input": dict(zip(map(str, names), values, strict=True))}
