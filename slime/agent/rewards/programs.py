"""What the code reward reads and runs: the program of an answer, the tests of a label, their runner."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Checks:
    """Either asserts, run behind the program, or pairs of standard input and expected output."""

    asserts: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def num(self) -> int:
        return len(self.asserts) + len(self.pairs)


def program_in(response: str) -> str | None:
    """The last fenced block; None: the answer has none."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else None


def read_checks(label: Any) -> Checks:
    """Checks in any of the forms that data sets use; ValueError where there are none.

    A list of assert statements, or text with one a line; {"asserts": [...]}; {"inputs": [...], "outputs":
    [...]}; a list of {"input", "output"}; each also as JSON in a string.
    """
    if isinstance(label, str) and label.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # text that happens to begin like that
            label = json.loads(label)
    if isinstance(label, str):
        label = [line for line in label.splitlines() if line.strip()]
    if isinstance(label, dict):
        label = _entries(label)
    if not isinstance(label, list) or not label:
        raise ValueError(
            "a label for code is a list of asserts, or inputs and outputs; this one has no tests"
        )
    if all(isinstance(one, str) for one in label):
        return Checks(asserts=tuple(label))
    if all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in label):
        return Checks(pairs=tuple((_text(one["input"]), _text(one["output"])) for one in label))
    raise ValueError('each test is an assert statement, or an object with "input" and "output"')


def _entries(label: dict[str, Any]) -> list[Any]:
    if isinstance(label.get("asserts"), list):
        return list(label["asserts"])
    inputs, outputs = label.get("inputs"), label.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(
            f'a label for code has "asserts", or "inputs" and "outputs"; this one has {sorted(label)}'
        )
    if len(inputs) != len(outputs):
        raise ValueError(
            f"the label has {len(inputs)} inputs and {len(outputs)} outputs; there must be as many"
        )
    return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def _text(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else "\n".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )


def same_output(printed: str, expected: str) -> bool:
    """Equal but for spaces at the ends of lines and empty lines at the end."""
    return [line.rstrip() for line in printed.rstrip().split("\n")] == [
        line.rstrip() for line in expected.rstrip().split("\n")
    ]


# Runs each assert behind the program in a process of its own: one that hangs, exits or spoils a global takes
# no other with it. A test counts when its process comes to the end and says the word that only the runner
# knows; leaving early, with any exit code, does not count. It imports nothing that takes long: `json` and
# `signal` would be a third of its seconds.
RUNNER = """
import os, select, sys, time
word, program, tests, seconds = eval(sys.stdin.read())
results = []
for test in tests:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(reader)
        say, leave, said = os.write, os._exit, word.encode()
        try:
            space = {"__name__": "answer"}
            exec(compile(program, "answer", "exec"), space)
            exec(compile(test, "test", "exec"), space)
            say(writer, said)
        except BaseException:
            pass
        leave(0)
    os.close(writer)
    heard, deadline = b"", time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            break
        more = os.read(reader, 64)
        heard += more
        if not more:
            break
    os.close(reader)
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass
    os.waitpid(pid, 0)
    results.append(heard == word.encode())
print(word, *map(int, results))
"""
