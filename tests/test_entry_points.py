"""The scripts at the root only call the package, and nothing in the package imports them."""

import ast
import tomllib
from pathlib import Path

import pytest
from source_trees import nodes_of

ROOT = Path(__file__).parent.parent


def test_nothing_in_the_package_imports_the_scripts_at_the_root():
    scripts = {"train", "train_async"}
    wrong = []
    for path in (ROOT / "slime").rglob("*.py"):
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            wrong += [
                f"{path.relative_to(ROOT)} imports {name}" for name in names if name.split(".")[0] in scripts
            ]
    assert not wrong, wrong


def test_the_wheel_holds_the_package_and_no_module_beside_it():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert not setuptools.get("py-modules")
    assert setuptools["packages"]["find"]["include"] == ["slime*"]


def test_code_that_imports_the_loops_from_the_checkout_still_works():
    import slime.loop
    import slime.loop_async
    import train
    import train_async

    assert train.train is slime.loop.train
    assert train_async.train is slime.loop_async.train


@pytest.mark.parametrize("script", ["train.py", "train_async.py"])
def test_the_scripts_at_the_root_only_call_the_loops(script):
    tree = ast.parse((ROOT / script).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.For))]
    assert len((ROOT / script).read_text().splitlines()) <= 12
