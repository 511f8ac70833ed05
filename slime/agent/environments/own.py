"""A class of the user's own: `--env my_package.envs:Maze`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.utils.misc import load_function


def task_names() -> None:
    """Any path is tried."""
    return None


def make(task: str, options: Mapping[str, Any]) -> Any:
    """An object of the class, called with the options of --env-args."""
    made = load_function(task)(**options)
    missing = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
    if missing:
        raise TypeError(f"{task} has no method {' and no method '.join(missing)}")
    return made
