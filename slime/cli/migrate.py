"""`slime migrate SCRIPT`: convert a launch script of THUDM/slime into a run.yaml, without running it.

Settings that could not be evaluated are listed above the others and on the terminal.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from slime.cli.bash_scripts import Settings, evaluate_script, run_with_pipes, unknown_settings
from slime.cli.launch import SCRIPTS
from slime.cli.main import user_errors
from slime.utils.machine.own_command import as_typed
from slime.utils.printable import printable

_RECORD = """
import json, os, runpy, sys
from slime.cli import launch
from slime.utils import misc

def record(train_args, *args, **kwargs):
    model = kwargs.get("megatron_model_type") or (args[1] if len(args) > 1 else None)
    words = [kwargs.get("train_script", "train.py"), *launch.train_words(train_args, model)]
    os.write(3, json.dumps(words).encode())
    os._exit(0)

launch.exec_command = misc.exec_command = lambda *a, **k: ""
launch.execute_train = record
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main(argv: Sequence[str] | None = None) -> int:
    what = "Convert a launch script of THUDM/slime into a run.yaml, without running it."
    parser = argparse.ArgumentParser("slime migrate", description=what)
    parser.add_argument("script", type=Path, help="a bash script, or a Python launcher")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="arguments of the script: $1, $2, ...")
    with user_errors():
        given = parser.parse_args(argv)
        script: Path = given.script
        if not script.is_file():
            why = "it is a folder; give the script in it" if script.is_dir() else "there is no such file"
            raise ValueError(f"{script}: {why}.")
        evaluate = _of_python if script.suffix == ".py" else _of_bash
        program, settings, unknown = evaluate(script.resolve(), given.words)
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=1000)
        notes = [*unknown, *_notes(text)]
    command = SCRIPTS.get(os.path.basename(program), program)
    for note in unknown:  # on stderr, too: stdout often goes to a file, where notes are overlooked
        print(note, file=sys.stderr)
    print(f"# {script.name} as settings: {as_typed(command, '--config', 'run.yaml')}")
    print("".join(f"# {line}\n" for note in notes for line in note.splitlines()) + text, end="")
    return 0


def settings_of(words: Sequence[str]) -> Settings:
    """Return {flag: value}; a switch is true, several words are a list."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            values = found[option.removeprefix("--")] = [value] if equals else []
        else:
            values.append(word)
    return {
        name: True if not values else _scalar(values[0]) if len(values) == 1 else [*map(_scalar, values)]
        for name, values in found.items()
    }


def _scalar(word: str) -> object:
    """Convert a number; anything else stays text."""
    value = yaml.safe_load(word) if re.fullmatch(r"[-+]?[\d.]+", word) else word
    return value if isinstance(value, (int, float, str)) else word


def _of_bash(script: Path, given: Sequence[str]) -> tuple[str, Settings, list[str]]:
    evaluator, base = evaluate_script(script, given)
    name, _ = _training(script, base.words, base.printed)
    settings, notes = unknown_settings(evaluator, given, base, lambda words: settings_of(_flags(words)))
    return name, settings, notes


def _of_python(script: Path, given: Sequence[str]) -> tuple[str, Settings, list[str]]:
    command = [sys.executable, "-c", _RECORD, str(script), *given]
    found, _, printed = run_with_pipes(command, dict(os.environ), script.parent)
    words: list[str] = json.loads(found) if found else []
    name, flags = _training(script, words, printed)
    return name, settings_of(flags), []


def _training(script: Path, words: Sequence[str], printed: str) -> tuple[str, Sequence[str]]:
    """Return the program that trains, and its flags."""
    if not words:
        last = printed.strip().splitlines()[-1:]
        raise ValueError(
            f"{script} contains no known training command (python train.py, ray job submit ... -- python3 "
            f"train.py, slime train, execute_train){': ' + printable(last[0][:200]) if last else '.'}"
        )
    flags = _flags(words)
    return words[len(words) - len(flags) - 1], flags


def _flags(words: Sequence[str]) -> Sequence[str]:
    names = (*SCRIPTS, *SCRIPTS.values())
    return words[next(i for i, word in enumerate(words) if os.path.basename(word) in names) + 1 :]


def _notes(text: str) -> list[str]:
    """Return the parser's notes: derived values, unused flags, errors."""
    from slime.arguments.parser import parse_args  # imported here: --help does not need it

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(None):
        file = Path(folder) / "run.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            args = parse_args(["--config", str(file)])
        except ValueError as error:
            refused = f"refused on this machine: {str(error).replace(str(file), 'run.yaml')}"
            return [refused, *getattr(error, "__notes__", [])]
    derived = [f"{name}: {source}" for name, source in args.sources.items() if source.startswith("derived")]
    return [*args.warnings, "derived:", *(f"  {line}" for line in derived)]
