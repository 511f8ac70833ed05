"""Environments that are classes of the user: `--env my_package.envs:Maze`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from slime.catalog.environments import ENVIRONMENTS
from slime.utils.misc import load_function


def check(task: str) -> None:
    """Raise ValueError for a path that names no environment."""
    try:
        found = load_function(task)
    except Exception as error:  # a file of the user's may raise anything
        family, _, _ = task.partition(":")
        near = difflib.get_close_matches(family, ENVIRONMENTS, n=1, cutoff=0.6)
        meant = f"did you mean {near[0]}?" if near else "a class of yours is module:Class or file.py:Class."
        raise ValueError(
            f"--env {task}: {type(error).__name__}: {error}; {family!r} is no environment family either; "
            f"{meant}"
        ) from error
    if not callable(found):
        raise ValueError(f"--env {task}: it is a {type(found).__name__}, not a class")
    if isinstance(found, type):
        _check_methods(task, found)


def make(task: str, options: Mapping[str, Any]) -> Any:
    """Create an object of the class with the options of --env-args."""
    made = load_function(task)(**options)
    _check_methods(task, made)
    return made


def _check_methods(task: str, owner: Any) -> None:
    missing = [name for name in ("reset", "step") if not callable(getattr(owner, name, None))]
    if missing:
        raise ValueError(f"--env {task}: the class has no method {' and no method '.join(missing)}")
