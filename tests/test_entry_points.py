"""Commands run slime's own loops: a stranger's `train.py`
in the working folder or on the path is never imported.
"""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from argument_helpers import base_argv
from source_trees import tree_of

ROOT = Path(__file__).parent.parent
STRANGER = "print('the stranger ran')\n\n\ndef train(args): pass\n"
# Each loop refuses one flag before it starts anything, so its complaint tells that it was reached.
COMPLAINTS = {
    "train": (("--update-weights-interval", "2"), "--update-weights-interval: it needs"),
    "train-async": (("--colocate",), "--colocate: it makes engines and trainer take turns"),
}
AS_MODULE = ("-m", "slime")
AS_SCRIPT = ("-c", "import sys; from slime.cli.main import main; sys.exit(main())")


@pytest.mark.parametrize(
    "command, form, here",
    [("train", AS_MODULE, True), ("train", AS_SCRIPT, False), ("train-async", AS_MODULE, True)],
)
def test_a_strangers_train_py_is_never_imported(tmp_path, command, form, here):
    for name in ("train.py", "train_async.py"):
        (tmp_path / name).write_text(STRANGER)
    path = [str(ROOT)] if here else [str(tmp_path), str(ROOT)]
    words, complaint = COMPLAINTS[command]
    done = subprocess.run(
        [sys.executable, *form, command, *base_argv(), *words, "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path if here else ROOT / "tests",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"},
    )
    assert "the stranger ran" not in done.stdout
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr


def test_nothing_in_the_package_imports_the_scripts_at_the_root():
    scripts = {"train", "train_async"}
    wrong = []
    for path in (ROOT / "slime").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
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
