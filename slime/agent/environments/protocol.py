"""The interface of an environment: `reset`, `step`, `score`, and the values that they take and return.

Your class needs no base class (example: docs/environments.md). Its methods may be plain or async: plain ones
run in a thread that belongs to the episode, so that one that hangs blocks no other episode.

Optional, for episodes that survive a killed run: `save` returns the state as plain values, and
`restore(item, state)` takes the place of `reset`. `deterministic = True`: the same actions lead to the same
state, and nothing outside of the object changes. `repeatable = True`: a step that was interrupted may be made
again, from the state before it. `step(action, call_id)` gets an id that is the same when it is made again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Item:
    """The task of an episode. The same item gives the same start every time.

    `seed` numbers the items that an environment makes itself; items for evaluation (`held_out`) and for
    training have different seeds. With --prompt-data, `prompt`, `label` and `metadata` are the row's.
    """

    seed: int
    held_out: bool = False
    prompt: Any = ""
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observation:
    """The next input of the policy. `player`: whose turn it is, if there are several.

    `images` (PIL, bytes, paths, data URLs) replace `<image>` in the text, or precede it.
    """

    text: str
    images: tuple[Any, ...] = ()
    role: str = "user"  # or "tool"
    player: int = 0
    system: str | None = None  # of the first observation: the system message before it


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of an action. `observation` may be text alone, or None at the end.

    `reward` is for this action alone. `truncated`: the environment stopped the episode early.
    """

    observation: Observation | str | None = None
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)  # goes into the sample's metadata at the end


class EnvironmentFailure(Exception):
    """An environment raised, hung or returned something invalid: the episode has no score."""


def as_observation(name: str, call: str, value: Any) -> Observation:
    """Check an observation; text alone is one, too."""
    if isinstance(value, str):
        value = Observation(value)
    fits = isinstance(value, Observation) and isinstance(value.text, str)
    if not fits or not isinstance(value.images, (tuple, list)) or not (value.text or value.images):
        problem = f"environment {name}: {call} gave {str(value)[:80]!r}"
        raise EnvironmentFailure(
            f"{problem}; return text, or an Observation with text or images (a tuple of them)"
        )
    return value


def as_step(name: str, value: Any) -> StepResult:
    """Check what `step` returned."""
    if not isinstance(value, StepResult):
        raise EnvironmentFailure(
            f"environment {name}: step returned {type(value).__name__}; return a StepResult "
            "(slime.agent.environments.protocol)"
        )
    if not is_number(value.reward):
        raise EnvironmentFailure(
            f"environment {name}: step gave the reward {value.reward!r}, which is not a finite number"
        )
    if value.observation is None and not (value.done or value.truncated):
        raise EnvironmentFailure(f"environment {name}: step returned no observation before the end")
    return value


def as_scores(name: str, value: Any, players: int) -> dict[int, float]:
    """Return the result of `score` by player; None is 0."""
    scores = dict.fromkeys(range(players), 0.0)
    given = value if isinstance(value, Mapping) else {} if value is None else {0: value}
    for player, score in given.items():
        if player not in scores or not is_number(score):
            raise EnvironmentFailure(
                f"environment {name}: score returned {str(value)[:80]!r}; return a finite number, or of "
                f"{players} players a dict by their number"
            )
        scores[player] = float(score)
    return scores


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.number)) and math.isfinite(value)
