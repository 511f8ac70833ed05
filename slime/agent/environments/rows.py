"""Items that environments make themselves, as rows of a prompt source: `env:reasoning_gym:gcd#train:1000`.

A row holds a task and a seed, from which the environment makes the item when an episode starts. Seeds for
training are odd and seeds for evaluation even, so that the two never overlap; they depend only on the row:
the data source orders, repeats and resumes them like the rows of a file.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from slime.catalog.environments import ENVIRONMENTS, HELD_OUT, Choice, read_source
from slime.data.mix import mix64
from slime.data.prompt_sources import Place, PlacedRows
from slime.utils.misc import is_installed

ENV_KEY, SEED_KEY, HELD_OUT_KEY = "env", "env_seed", "env_held_out"  # in Sample.metadata


def read_environment(source: str) -> PlacedRows:
    """Yield the rows of a source; tasks alternate in proportion to their weights."""
    choices, split, count = read_source(source)
    for choice in choices:
        check_task(choice, source)
    held_out = split == HELD_OUT
    for number, choice in enumerate(itertools.islice(_interleave(choices), count), start=1):
        seed = seed_of(number, held_out)
        metadata: dict[str, Any] = {ENV_KEY: choice.name, SEED_KEY: seed, HELD_OUT_KEY: held_out}
        row = {"input": f"{choice.name} {seed}", "metadata": metadata}
        yield Place(source, "row", number), row


def seed_of(number: int, held_out: bool) -> int:
    """Return a number of 30 bits whose last bit is the split."""
    return (mix64(number, 20 if held_out else 21) % 2**29) * 2 + (0 if held_out else 1)


def _interleave(choices: Sequence[Choice]) -> Iterator[Choice]:
    """Yield each task as often as its weight says, spread evenly: the task with the fewest rows for its
    weight is next.
    """
    total = sum(choice.weight for choice in choices)
    owed = [0.0] * len(choices)
    while True:
        owed = [debt + choice.weight / total for debt, choice in zip(owed, choices, strict=True)]
        first = max(range(len(choices)), key=lambda index: (owed[index], -index))
        owed[first] -= 1.0
        yield choices[first]


def check_task(choice: Choice, source: str) -> None:
    """Raise ValueError for a missing package, task or class."""
    row = ENVIRONMENTS[choice.family]
    if row.package is not None and not is_installed(row.package):
        raise ValueError(
            f"--env {choice.name} needs the package {row.package}: pip install 'slime-rl[{row.extra}]'"
        )
    module = import_module(row.module)
    if hasattr(module, "check"):
        module.check(choice.task)
    names = module.task_names() if hasattr(module, "task_names") else None  # without: any name is tried
    if names is not None and choice.task not in names:
        near = difflib.get_close_matches(choice.task, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {len(names)}, e.g. {names[0]}."
        raise ValueError(f"--env {choice.name}: {choice.family} has no task {choice.task!r}; {hint}")
