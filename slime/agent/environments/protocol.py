"""What an environment is: `reset`, `step`, `score`, and the values that go in and come out.

A class of your own needs no base class. Its methods may be plain or async: plain ones run in a thread of
their own, always the same one of an episode, so that one that hangs holds up nobody else.

    class Countdown:
        def reset(self, item):
            self.left = 3 + item.seed % 5
            return f"Say {self.left}."

        def step(self, action):
            right = action.strip() == str(self.left)
            self.left -= 1
            return StepResult(f"Say {self.left}.", reward=float(right), done=self.left == 0)

`score` is optional: what it returns at the end is added to the rewards of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Item:
    """What an episode is about. The same item gives the same start, however often it is played.

    `seed` numbers items that the environment makes itself; those for evaluation (`held_out`) have other
    numbers than those for training. With --prompt-data, `prompt`, `label` and `metadata` are the row's.
    """

    seed: int
    held_out: bool = False
    prompt: Any = ""
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy reads next. `player` is whose turn it is, where several play.

    `images` (PIL, bytes, paths, data URLs) stand where the text says `<image>`, else before it.
    """

    text: str
    images: tuple[Any, ...] = ()
    role: str = "user"  # or "tool"
    player: int = 0
    system: str | None = None  # of the first observation: the system message before it


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an action led to. `observation` may be text alone, or None at the end.

    `reward` is of this action alone. `truncated`: the environment gave up on the episode.
    """

    observation: Observation | str | None = None
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)  # goes into the sample's metadata at the end


class Environment(Protocol):
    """One episode at a time; a new object for each."""

    def reset(self, item: Item) -> Observation | str: ...

    def step(self, action: str) -> StepResult: ...

    def score(self) -> float | Mapping[int, float] | None:
        """Called at the end: what is added to the last turn's reward, by player where several play."""
        ...


class EnvironmentFailure(Exception):
    """An environment raised, hung or returned rubbish: the episode has no score, and says why."""


def as_observation(name: str, call: str, value: Any) -> Observation:
    """Text is an observation, too; anything else than these two is rubbish."""
    if isinstance(value, str):
        value = Observation(value)
    if not isinstance(value, Observation) or not isinstance(value.text, str):
        shown = type(value.text if isinstance(value, Observation) else value).__name__
        raise EnvironmentFailure(f"environment {name}: {call} gave {shown}; return text or an Observation")
    if not isinstance(value.images, (tuple, list)):
        shown = type(value.images).__name__
        raise EnvironmentFailure(f"environment {name}: {call} gave images as {shown}; give a tuple of them")
    if not (value.text or value.images):
        raise EnvironmentFailure(f"environment {name}: {call} gave an empty observation")
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
            f"environment {name}: step gave the reward {value.reward!r}, which is no finite number"
        )
    if value.observation is None and not (value.done or value.truncated):
        raise EnvironmentFailure(f"environment {name}: step gave no observation, and the episode is not done")
    return value


def as_scores(name: str, value: Any, players: int) -> dict[int, float]:
    """What `score` returned, by player; None is 0."""
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
