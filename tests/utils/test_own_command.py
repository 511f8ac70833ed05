"""Commands that are suggested can be typed as they are printed."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_trees import nodes_of

from slime.cli.main import COMMANDS
from slime.utils.machine.own_command import as_typed

ROOT = Path(__file__).parents[2]
SUGGESTION = re.compile(rf"(?<!\w)slime (?:{'|'.join(COMMANDS)})\b(?!:)[^\n]*")
NAMED = (  # as names, or within files that others read too
    "slime train]",
    "slime train` with these flags; your flags override them:",
    "slime sweep [--set NAME=VALUE,VALUE ...] [--seeds N] [--out DIR] -- [sft|dpo|...|train] FLAGS",
    "slime train",
    "slime ask",
    "slime train, execute_train)",
    "slime train --help` may stand here.",
    "slime dashboard` named when it started",
)
HELPS = ("ArgumentParser", "_parser", "add_argument", "add", "Command", "Table", "execute_train")


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A virtual environment in the current folder that is not activated."""
    folder = tmp_path / "with space" / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "slime"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(folder.parents[1])
    return folder


def test_a_script_that_no_shell_finds_is_named_by_its_path(environment, monkeypatch, tmp_path):
    assert as_typed("plot", "runs/a") == ".venv/bin/slime plot runs/a"
    monkeypatch.chdir(tmp_path)
    assert as_typed("plot", "runs/a b") == "'with space/.venv/bin/slime' plot 'runs/a b'"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert as_typed("plot") == f"'{environment}/slime' plot"


def test_an_activated_environment_needs_no_path(environment, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{environment}{os.pathsep}/usr/bin")
    assert as_typed("plot", "RUN") == "slime plot RUN"
    links = tmp_path / "links"
    links.mkdir()
    (links / "slime").symlink_to(environment / "slime")
    monkeypatch.setenv("PATH", str(links))
    assert as_typed("plot", "RUN") == "slime plot RUN"


def test_another_installation_on_the_path_is_not_taken_for_this_one(environment, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "slime").write_text("#!/bin/sh\n")
    (other / "slime").chmod(0o755)
    monkeypatch.setenv("PATH", str(other))
    assert as_typed("plot") == ".venv/bin/slime plot"


def test_without_a_script_the_module_is_run(environment):
    (environment / "slime").unlink()
    assert as_typed("plot") == ".venv/bin/python -m slime plot"


def test_the_end_of_make_install_names_a_command_that_can_be_typed():
    planned = subprocess.run(["make", "-n", "-B", "install"], cwd=ROOT, capture_output=True, text=True)
    assert ".venv/bin/slime quickstart" in planned.stdout, planned.stdout + planned.stderr


def test_no_message_suggests_a_bare_command():
    found = [f"{path}: {text}" for path in sorted((ROOT / "slime").rglob("*.py")) for text in messages(path)]
    assert not found, "use as_typed:\n" + "\n".join(found)


def messages(path: Path) -> Iterator[str]:
    """Texts of a module that name a command and are neither docstrings nor the help of a flag or command."""
    if path.parent.name == "groups" or path.name == "docs.py":  # declarations of flags; pages
        return
    nodes = nodes_of(path)
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name in HELPS:
            skipped |= {id(part) for part in ast.walk(call)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield from (text for text in SUGGESTION.findall(node.value) if text not in NAMED)
