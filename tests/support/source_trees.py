"""Syntax trees of source files, parsed and walked once: many tests look at all of them."""

import ast
import functools
from pathlib import Path

tree_in = functools.cache(ast.parse)


@functools.cache
def nodes_in(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a source text in the order of `ast.walk`."""
    return tuple(ast.walk(tree_in(text)))


def tree_of(path: Path) -> ast.Module:
    return tree_in(path.read_text(encoding="utf-8"))


def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return nodes_in(path.read_text(encoding="utf-8"))
