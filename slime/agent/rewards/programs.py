"""What the code reward reads and runs: the program of a response, the tests of a label, their grader."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Checks:
    """Either asserts about the program's names, or pairs of standard input and expected output."""

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


@functools.cache
def grader_text() -> tuple[str, str]:
    """Return the programs of the grader and of its worker, as they are sent to a sandbox."""

    def text(names: tuple[str, ...], start: str) -> str:
        here = Path(__file__)
        sources = [here.with_name(name).read_text() for name in names]
        return "\n".join([*(f"exec(compile({source!r}, 'box', 'exec'))" for source in sources), start])

    worker = text(("box_values.py", "box_worker.py"), "work()")
    return text(("box_values.py", "box_grader.py"), "main(sys.argv[1])"), worker
