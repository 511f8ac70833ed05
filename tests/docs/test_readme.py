"""README: short, with pictures that exist and a Python example that runs."""

import re
from pathlib import Path

from slime.cli import main as command
from slime.cli.new import main as new_task

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_shows_pictures():
    assert len(TEXT.splitlines()) <= 150
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert len(pictures) >= 2 and all((ROOT / path).is_file() for path in pictures)


def test_commands_in_its_sentences_exist():
    named = set(re.findall(r"`slime ([a-z-]+)[^`]*`", TEXT))
    assert len(named) > 8 and named <= set(command.COMMANDS)


def test_its_python_example_trains(tmp_path, monkeypatch):
    """Two steps of it, from the folder that `slime new mytask` makes."""
    monkeypatch.chdir(tmp_path)
    assert not new_task(["mytask"])
    [example] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    scope: dict = {"__name__": "readme_example"}
    exec(example.replace("num_rollout=15", "num_rollout=2"), scope)
    assert sorted(scope["result"].curve()) == [0, 1] and scope["result"].model_path.is_dir()
