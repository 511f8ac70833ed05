"""Makes the data of two laptop recipes, problems that are small enough for SmolLM2-135M:

    python recipes/laptop/make_data.py      # data/math.jsonl and data/code.jsonl

One problem in eight is kept out of training, in `data/math-held-out.jsonl` and so on, for the evaluations.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_OUT_ONE_IN = 8
NUM_HELD_OUT = 32

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("data"))
    parser.add_argument("--rows", type=int, default=512, help="of each training file")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, problems in (("math", sums()), ("code", programs())):
        training: list[Row] = []
        held_out: dict[str, Row] = {}
        while len(training) < options.rows or len(held_out) < NUM_HELD_OUT:
            problem, row = next(problems)
            if is_held_out(problem):
                held_out[row["prompt"]] = row
            else:
                training.append(row)
        write(options.folder / f"{name}.jsonl", training[: options.rows])
        write(options.folder / f"{name}-held-out.jsonl", list(held_out.values())[:NUM_HELD_OUT])


def is_held_out(problem: str) -> bool:
    """By a hash of the problem, so that it is the same in every file that is made."""
    return hashlib.sha256(problem.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} rows")


def sums() -> Iterator[tuple[str, Row]]:
    """Sums and differences of numbers up to 20."""
    draw = random.Random(0)
    while True:
        a, b = draw.randint(2, 20), draw.randint(2, 20)
        sign, value = ("+", a + b) if draw.random() < 0.5 else ("-", a - b)
        if value >= 0:
            text = f"What is {a} {sign} {b}? Answer with the number only."
            yield text, {"prompt": text, "label": str(value)}


@dataclass(frozen=True)
class Function:
    """A function that the model is asked for, and what it returns."""

    words: str
    returns: Callable[[int], int]


FUNCTIONS = [
    *(Function(f"returns n plus {k}", lambda n, k=k: n + k) for k in range(2, 30)),
    *(Function(f"returns n minus {k}", lambda n, k=k: n - k) for k in range(2, 30)),
    *(Function(f"returns {k} times n", lambda n, k=k: n * k) for k in range(2, 30)),
    *(Function(f"returns n times n plus {k}", lambda n, k=k: n * n + k) for k in range(2, 30)),
]
NAMES = ("f", "g", "step", "change", "value", "compute")


def programs() -> Iterator[tuple[str, Row]]:
    """Functions of one line, each with four tests."""
    draw = random.Random(0)
    while True:
        function, name = draw.choice(FUNCTIONS), draw.choice(NAMES)
        text = f"Write a Python function {name}(n) that {function.words}. Write only the code."
        tests = [f"assert {name}({n}) == {function.returns(n)}" for n in draw.sample(range(-20, 60), 4)]
        yield function.words, {"prompt": text, "label": tests}


if __name__ == "__main__":
    main()
