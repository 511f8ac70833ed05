"""Our own code never writes to `args` after parsing: facts of a run have a home of their own (RunInfo)."""

import ast
from pathlib import Path

import pytest
from source_trees import nodes_in

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "slime").rglob("*.py")), ROOT / "train.py", ROOT / "train_async.py"]
NAMES = ("args", "_args", "plugin_args", "_plugin_args")
WRITERS = ("setattr", "delattr")


def names_args(node: ast.expr) -> bool:
    """Whether an expression is the arguments object: `args`, `self.args`, `vars(args)`, `args.__dict__`."""
    if isinstance(node, ast.Name):
        return node.id in NAMES
    if isinstance(node, ast.Attribute):
        return node.attr in NAMES or (node.attr == "__dict__" and names_args(node.value))
    is_vars = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars"
    return is_vars and bool(node.args) and names_args(node.args[0])


def is_write(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return names_args(node.value)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        # vars(args)["x"] = ... and args.__dict__["x"] = ...; a plain list
        # called args is not the arguments object.
        return not isinstance(node.value, (ast.Name, ast.Attribute)) and names_args(node.value)
    if not isinstance(node, ast.Call):
        return False
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    writes_by_name = name in WRITERS or name in ("__setattr__", "__delattr__")
    if writes_by_name:
        return any(names_args(argument) for argument in node.args[:1])
    is_update = (
        name == "update" and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call)
    )
    return is_update and names_args(node.func.value)


def writes(text: str) -> list[int]:
    return [node.lineno for node in nodes_in(text) if is_write(node)]


def test_no_code_of_ours_writes_to_args():
    found = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if path.exists() and (lines := writes(path.read_text(encoding="utf-8")))
    }
    assert not found, f"args is written to in {found}; use RunInfo, args.replace or a local name"


@pytest.mark.parametrize(
    "line",
    [
        "args.x = 1",
        "self.args.x = 1",
        "self._args.x += 1",
        "args.x: int = 1",
        "del args.x",
        "for args.x in y: pass",
        "setattr(args, 'x', 1)",
        "object.__setattr__(args, 'x', 1)",
        "vars(args)['x'] = 1",
        "vars(args).update(x=1)",
        "a, args.x = 1, 2",
    ],
)
def test_every_way_of_writing_is_noticed(line):
    assert writes(line)


@pytest.mark.parametrize(
    "line", ["args = parse()", "x = args.y", "self.args = args", "args[0] = 1", "kwargs.x = 1"]
)
def test_reading_and_binding_are_not_writing(line):
    assert not writes(line)
