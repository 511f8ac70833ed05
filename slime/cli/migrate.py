"""`slime migrate SCRIPT`: the run.yaml that a launch script of slime amounts to; nothing of it is run.

Bash evaluates the script, so that arrays, sourced model files and conditions count, but a guard skips every
command that is not harmless: what kills, starts or writes never happens. The first training is caught.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from slime.cli.launch import SCRIPTS
from slime.cli.main import user_errors
from slime.utils.machine.own_command import as_typed

# Builtins and tools that only compute or read; other commands of a script are skipped.
_HARMLESS = (
    "echo printf source . export local declare readonly unset shift true false : test [ [[ cd pwd dirname "
    "basename seq date tr cut head tail wc cat readlink realpath let read mapfile for case select return"
)
# Commands that start others, among which the training may be.
_STARTERS = (
    "python python3 slime nohup exec torchrun uv srun mpirun accelerate timeout env stdbuf setsid nice "
    "numactl sudo conda poetry xargs docker"
)
_GUARD = r"""
__found() {
  local word
  for word in "$@"; do
    case "$word" in
      *train.py|*train_async.py|train|train-async) printf '%s\0' "$@" >&3; exit 0;;
      *train.py[[:space:]]*|*train_async.py[[:space:]]*|*slime\ train*) __script "$word";;
    esac
  done
}
__script() { builtin eval "$1"; }
ray() { while [[ $# -gt 0 && $1 != -- ]]; do shift; done; __found "$@"; }
for word in $STARTERS; do builtin eval "$word() { __found \"\$@\"; }"; done
eval() { __script "$*"; }
bash() {
  local script
  while [[ ${1:-} == -* ]]; do [[ $1 == -*c ]] && script=1; shift; done
  if [[ -n ${script:-} ]]; then __script "$1"; elif [[ -f ${1:-} ]]; then source "$@"; fi
}
sh() { bash "$@"; }
cd() { builtin cd "$@" 2>/dev/null || true; }
__guard() {
  [[ ${FUNCNAME[1]:-} == __found && $BASH_COMMAND != '__script "$word"' ]] && return 0
  [[ $BASH_COMMAND == 'builtin eval "$1"' || $BASH_COMMAND == 'builtin cd '* ]] && return 0
  local command=$BASH_COMMAND kept
  local assign=$'^[A-Za-z_][A-Za-z0-9_]*=("[^"]*"|\'[^\']*\'|[^[:space:]"\'(]*)[[:space:]]+(.+)$'
  while [[ $command =~ $assign ]]; do command=${BASH_REMATCH[2]}; done
  local word=${command%%[[:space:]]*}
  [[ $word == *=* || $word == '(('* ]] && return 0
  if [[ $word == '$'* || $word == '"$'* ]] && [[ $command != *'$('* && $command != *'`'* ]]; then
    local -a words
    command=${command%%[12&]>*}
    builtin eval "words=( ${command%%>*} )"
    __found "${words[@]}"
    return 1
  fi
  [[ " $HARMLESS " == *" $word "* || $(builtin type -t "$word") == function ]] || return 1
  [[ $word == '[['* ]] && return 0
  for kept in '2>&1' '>&2' {'&>','2>','>'}{'',' '}/dev/null
  do command=${command//"$kept"/}; done
  [[ $command != *'>'* ]] && return 0
  [[ $(builtin type -t "$word") == function ]] && builtin eval "${command%%>*}"  # without its log file
  return 1
}
shopt -s extdebug
trap __guard DEBUG
source "$SLIME_SCRIPT" "$@"
"""
_RECORD = """
import json, os, runpy, sys
from slime.cli import launch

def record(train_args, *args, **kwargs):
    model = kwargs.get("megatron_model_type") or (args[1] if len(args) > 1 else None)
    words = [kwargs.get("train_script", "train.py"), *launch.train_words(train_args, model)]
    os.write(3, json.dumps(words).encode())
    os._exit(0)

launch.exec_command, launch.execute_train = (lambda *a, **k: ""), record
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="slime migrate", description="Print the run.yaml that a launch script of slime amounts to."
    )
    parser.add_argument("script", type=Path, help="a bash script, or a Python launcher")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="what the script is given as $1, $2, ...")
    with user_errors():
        given = parser.parse_args(argv)
        script = given.script
        if not script.is_file():
            raise ValueError(f"{script}: there is no such file.")
        words = (_of_python if script.suffix == ".py" else _of_bash)(script.resolve(), given.words)
        start = next(
            i for i, word in enumerate(words) if os.path.basename(word) in (*SCRIPTS, *SCRIPTS.values())
        )
        text = yaml.safe_dump(settings_of(words[start + 1 :]), sort_keys=False, allow_unicode=True)
        notes = _notes(text)
    command = SCRIPTS.get(os.path.basename(words[start]), words[start])
    print(f"# {script.name} as settings: {as_typed(command, '--config', 'run.yaml')}")
    print("".join(f"# {line}\n" for note in notes for line in note.splitlines()) + text, end="")
    return 0


def settings_of(words: Sequence[str]) -> dict[str, object]:
    """Flag -> value, in the order of the command line; a switch is true, several words are a list."""
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
    """Numbers as numbers; all else as text, JSON too."""
    value = yaml.safe_load(word) if re.fullmatch(r"[-+]?[\d.]+", word) else word
    return value if isinstance(value, (int, float, str)) else word


def _of_bash(script: Path, given: Sequence[str]) -> list[str]:
    """The words of the first training command. Variables that nothing sets stay as they are written,
    unless the script asks whether they are set.
    """
    text = script.read_text(encoding="utf-8", errors="replace")
    names = set(re.findall(r"\$\{?([A-Z][A-Z0-9_]*)\b(?!\[|:?[-=])", text)) - set(os.environ)
    names -= set(re.findall(r"\b([A-Z][A-Z0-9_]*)\+?=", text))
    names -= set(re.findall(r"\$\{([A-Z][A-Z0-9_]*):?=", text))
    names -= set(re.findall(r"-[nv]\s+\"?\$?\{?([A-Z][A-Z0-9_]*)", text))
    env = os.environ | {name: "${" + name + "}" for name in names if not name.startswith("BASH")}
    env |= {"SLIME_SCRIPT": str(script), "HARMLESS": _HARMLESS, "STARTERS": _STARTERS}
    found = _run(["bash", "-c", _GUARD, "bash", *given], env, script)
    return [word for word in found.split("\0") if word]


def _of_python(script: Path, given: Sequence[str]) -> list[str]:
    command = [sys.executable, "-c", _RECORD, str(script), *given]
    found: list[str] = json.loads(_run(command, dict(os.environ), script))
    return found


def _run(command: list[str], env: dict[str, str], script: Path) -> str:
    """What the command writes to its file descriptor 3."""
    with tempfile.TemporaryFile("w+b") as out:
        shell = ["bash", "-c", f'exec 3>&{out.fileno()}; exec "$@"', "bash", *command]
        done = subprocess.run(
            shell, env=env, cwd=script.parent, pass_fds=[out.fileno()], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=120,
        )  # fmt: skip
        out.seek(0)
        found = out.read().decode(errors="replace")
    if not found:
        last = done.stderr.strip().splitlines()[-1:]
        raise ValueError(
            f"{script} starts no training that is recognised (python train.py, ray job submit ... -- python3 "
            f"train.py, slime train, execute_train){': ' + last[0] if last else '.'}"
        )
    return found


def _notes(text: str) -> list[str]:
    """What the parser says: what it derives, what does nothing, what keeps these settings from running."""
    from slime.arguments import (
        parse_args,
    )  # it reads the tables of other programs, which --help does not need

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
