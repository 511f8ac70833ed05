"""Finds the training command of a bash launch script without running it.

Bash evaluates the script, so arrays, sourced model files and conditions work, but a guard skips every command
that may have an effect. The output of a skipped command is unknown, so the script is evaluated again
with a marker in its place: a setting that differs then depends on that command.
"""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
# What a skipped command would have printed is unknown: a number stands for it if $SLIME_MARKED is set.
__skip() {
  (( BASH_SUBSHELL > 0 )) || return 0
  printf 'skipped\t%s\t%s\t%s\0' "${BASH_LINENO[1]}" "77${BASHPID}77" "$1" >&4
  if [[ -n $SLIME_MARKED ]]; then echo "77${BASHPID}77"; fi
}
for word in $STARTERS; do
  builtin eval "$word() { local written=\$__written; __found \"\$@\"; __skip \"\$written\"; }"
done
date() {
  case " $* " in *" -d"*|*" --date"*) command date "$@";; *) command date -d "@$SLIME_NOW" "$@";; esac
}
eval() { __script "$*"; }
bash() {
  local script
  while [[ ${1:-} == -* ]]; do [[ $1 == -*c ]] && script=1; shift; done
  if [[ -n ${script:-} ]]; then __script "$1"; elif [[ -f ${1:-} ]]; then source "$@"; fi
}
sh() { bash "$@"; }
cd() { builtin cd "$@" 2>/dev/null || true; }
# What follows the first word of a command, which may hold quotes and substitutions in each other.
__after_word() {
  local text=$1 stack="" c top plain
  while :; do
    top=${stack: -1}
    case "$top" in
      "'") plain=${text%%\'*};;
      "") plain=${text%%[\\\"\`\'\(\)[:space:]]*};;
      *) plain=${text%%[\\\"\`\'\(\)]*};;
    esac
    text=${text:${#plain}}
    c=${text:0:1}
    [[ -z $c || ( -z $stack && $c == [[:space:]] ) ]] && break
    text=${text:1}
    case "$c" in
      \\) text=${text:1};;
      "'") if [[ $top == "'" ]]; then stack=${stack%?}; elif [[ $top != '"' ]]; then stack+=$c; fi;;
      '"'|'`') if [[ $top == "$c" ]]; then stack=${stack%?}; else stack+=$c; fi;;
      '(') [[ $top != '"' || ${plain: -1} == '$' ]] && stack+=$c;;
      ')') [[ $top == '(' ]] && stack=${stack%?};;
    esac
  done
  __rest=${text#"${text%%[![:space:]]*}"}
}
__guard() {
  [[ ${FUNCNAME[1]:-} == __found && $BASH_COMMAND != '__script "$word"' ]] && return 0
  [[ ${FUNCNAME[1]:-} == __skip || $BASH_COMMAND == 'command date '*'"$@"' ]] && return 0
  [[ $BASH_COMMAND == 'builtin eval "$1"' || $BASH_COMMAND == 'builtin cd '* ]] && return 0
  local command=$BASH_COMMAND kept
  while [[ $command =~ ^[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?= ]]; do
    __after_word "$command"
    [[ -z $__rest ]] && return 0
    command=$__rest
  done
  local word=${command%%[[:space:]]*}
  [[ $word == '(('* ]] && return 0
  [[ " $STARTERS " == *" $word "* ]] && __written=$command
  if [[ $word == '$'* || $word == '"$'* ]] && [[ $command != *'$('* && $command != *'`'* ]]; then
    local -a words
    command=${command%%[12&]>*}
    builtin eval "words=( ${command%%>*} )"
    __found "${words[@]}"
    __skip "$command"
    return 1
  fi
  if [[ $word == exit && $BASH_SUBSHELL == 0 && $command != 'exit 0' ]]; then
    printf 'exit\t%s\t\t%s\0' "${BASH_LINENO[0]}" "$command" >&4
    return 1
  fi
  if [[ " $HARMLESS " != *" $word "* && $(builtin type -t "$word") != function ]]; then
    __skip "$command"
    return 1
  fi
  [[ $word == '[['* ]] && return 0
  for kept in '2>&1' '>&2' {'&>','2>','>'}{'',' '}/dev/null
  do command=${command//"$kept"/}; done
  [[ $command != *'>'* ]] && return 0
  [[ $(builtin type -t "$word") == function ]] && builtin eval "${command%%>*}"  # without its log file
  return 1
}
RANDOM=1
shopt -s extdebug
trap __guard DEBUG
source "$SLIME_SCRIPT" "$@"
"""

_LIMIT_S = 60
_ARGUMENTS = 9  # of a script, which are read as $1 to $9
_ARGUMENT = r"\$\{[1-9]\}"
Settings = dict[str, object]
SettingsOf = Callable[[Sequence[str]], Settings]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of evaluating a script once."""

    words: list[str]  # of the first training command; empty: none was found
    skipped: list[tuple[int, str, str]]  # line, marker in place of its output, command
    exits: list[tuple[int, str]]  # line and command of each skipped `exit` before the training
    printed: str


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a script in one folder; time and random numbers are the same in every evaluation."""

    script: Path
    start: Path
    now: int

    def evaluate(self, given: Sequence[str], *, marked: bool = False) -> Evaluation:
        """Evaluate the script. `marked`: skipped commands print their marker instead of nothing."""
        env = _environment(self.script)
        env |= {"SLIME_MARKED": "1" if marked else "", "SLIME_NOW": str(self.now)}
        command = ["bash", "-c", _GUARD, str(self.script), *given]
        found, log, printed = run_with_pipes(command, env, self.start)
        rows = [row.split("\t", 3) for row in log.split("\0") if row]
        return Evaluation(
            [word for word in found.split("\0") if word],
            [(int(line), marker, text) for kind, line, marker, text in rows if kind == "skipped"],
            [(int(line), text) for kind, line, _, text in rows if kind == "exit"],
            printed,
        )


def evaluate_script(script: Path, given: Sequence[str]) -> tuple[Evaluator, Evaluation]:
    """Evaluate a script in the first folder where all sourced files exist.

    Candidates are the current folder, the script's own, and the one above it (`bash scripts/run.sh`).
    """
    tried: list[tuple[int, Evaluator, Evaluation]] = []
    now = int(time.time())
    for start in dict.fromkeys([Path.cwd(), *script.parents][:5]):
        evaluator = Evaluator(script, start, now)
        base = evaluator.evaluate(given)
        tried.append((len(unread_files(base)), evaluator, base))
        if not tried[-1][0]:
            break
    _, evaluator, base = min(tried, key=lambda entry: (not entry[2].words, entry[0]))
    return evaluator, base


def unread_files(base: Evaluation) -> list[tuple[int, str]]:
    """Return lines and names of missing files that the script sources or reads."""
    found = re.findall(r"(?m): line (\d+): (.+): No such file or directory$", base.printed)
    return [(int(line), file) for line, file in found]


def unknown_settings(
    evaluator: Evaluator, given: Sequence[str], base: Evaluation, settings_of: SettingsOf
) -> tuple[Settings, list[str]]:
    """Return the settings, with `$(command)` and `${1}` for unknown values, and notes about them.

    In a second evaluation every skipped command prints a marker, and missing arguments are `${1}`, ...
    """
    settings = settings_of(base.words)
    notes = [f"line {line}: {file} could not be read; is it relative to another folder?"
             for line, file in unread_files(base)]  # fmt: skip
    notes += [f"line {line}: the script ends here ({text}) on this machine; what follows may not be meant."
              for line, text in base.exits]  # fmt: skip
    missing = [f"${{{number}}}" for number in range(len(given) + 1, _ARGUMENTS + 1)]
    marked = evaluator.evaluate([*given, *missing], marked=True)
    again = settings_of(evaluator.evaluate(given).words)  # process ids differ each time
    commands = {marker: text for _, marker, text in marked.skipped}
    others = settings_of(marked.words) if marked.words else settings
    for name in dict.fromkeys([*settings, *others]):
        before, value = settings.get(name), others.get(name)
        if value == before or again.get(name) != before:
            continue
        used = [marker for marker in commands if marker in str(value)]
        if re.sub(_ARGUMENT, "", str(value)) == ("" if before is True else str(before)):
            settings[name] = value
            notes.append(
                f"{name} could not be evaluated: it needs arguments of the script; give them: "
                f"{as_typed('migrate', evaluator.script)} A B ..."
            )
        elif used or not re.search(_ARGUMENT, str(value)):  # else the script has a default for the argument
            is_alike = not isinstance(value, list) or (isinstance(before, list) and len(value) == len(before))
            settings[name] = _named(value, commands) if used and is_alike else "$(...)"
            lines = dict.fromkeys(
                f"`{text}` (line {line})"
                for line, marker, text in marked.skipped
                if marker in used or not used
            )
            notes.append(
                f"{name} could not be evaluated: it depends on {', '.join(lines)}, not run here; set it."
            )
    return settings, notes


def _named(value: object, commands: Mapping[str, str]) -> object:
    """Replace each marker in a value by `$(command)`."""
    if isinstance(value, list):
        return [_named(each, commands) for each in value]
    text = str(value)
    for marker, command in commands.items():
        text = text.replace(marker, f"$({command})")
    return value if text == str(value) else text


def _environment(script: Path) -> dict[str, str]:
    """Keep unset variables as written, unless the script tests whether they are set."""
    text = script.read_text(encoding="utf-8", errors="replace")
    names = set(re.findall(r"\$\{?([A-Z][A-Z0-9_]*)\b(?!\[|:?[-=])", text)) - set(os.environ)
    names -= set(re.findall(r"\b([A-Z][A-Z0-9_]*)\+?=", text))
    names -= set(re.findall(r"\$\{([A-Z][A-Z0-9_]*):?=", text))
    names -= set(re.findall(r"-[nv]\s+\"?\$?\{?([A-Z][A-Z0-9_]*)", text))
    names -= {"RANDOM", "SECONDS", "LINENO", "EPOCHSECONDS", "EPOCHREALTIME", "FUNCNAME", "PIPESTATUS"}
    env = os.environ | {name: "${" + name + "}" for name in names if not name.startswith("BASH")}
    return env | {"SLIME_SCRIPT": str(script), "HARMLESS": _HARMLESS, "STARTERS": _STARTERS}


def run_with_pipes(command: list[str], env: dict[str, str], start: Path) -> tuple[str, str, str]:
    """Run a command; return what it writes to descriptors 3 and 4, and what it prints."""
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as log:
        shell = ["bash", "-c", f'exec 3>&{out.fileno()} 4>&{log.fileno()}; exec "$@"', "bash", *command]
        try:
            done = subprocess.run(
                shell,
                env=env,
                cwd=start,
                pass_fds=[out.fileno(), log.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"the script was not evaluated within {_LIMIT_S} s: it may wait for a skipped command; "
                "remove the loop in a copy of the script, and migrate that."
            ) from None
        out.seek(0)
        log.seek(0)
        found, logged = (file.read().decode(errors="replace") for file in (out, log))
    return found, logged, done.stdout
