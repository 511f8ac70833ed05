"""Gymnasium: observations as text, actions read from text.

Observations of a Text space are used as they are, others are written as Python prints them (arrays as lists),
with the possible actions. With the option `render_mode` "ansi" the policy reads what the environment draws as
text instead, and with "rgb_array" it sees the picture. The action is, for a Discrete space, the last whole
number in the response or one of the names in the option `actions`; for a Text space the response; for a Box
its last numbers. A response without an action gets an error message and `invalid_reward` (-0.1). `prompt`
precedes the first observation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slime.agent.environments.protocol import EnvironmentFailure, Item, Observation, StepResult

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


class TextGymnasium:
    """One episode of a registered environment."""

    deterministic = True

    def __init__(self, task: str, options: Mapping[str, Any]):
        import gymnasium

        own = dict(options)
        self._actions: list[str] = [str(name) for name in own.pop("actions", [])]
        self._prompt: str = own.pop("prompt", "")
        self._invalid_reward = float(own.pop("invalid_reward", -0.1))
        self._env = gymnasium.make(task, **own)
        self._spaces = gymnasium.spaces

    def reset(self, item: Item) -> Observation:
        observation, _ = self._env.reset(seed=item.seed)
        seen = self._seen(observation)
        parts = [self._prompt, self._describe_actions(), seen.text]
        return Observation("\n".join(part for part in parts if part), seen.images)

    def step(self, action: str) -> StepResult:
        chosen = self._read(action)
        if chosen is None:
            said = f"No action was found in your response. {self._describe_actions()}".strip()
            return StepResult(Observation(said), reward=self._invalid_reward, tool_errors=1)
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        seen = None if terminated or truncated else self._seen(observation)
        return StepResult(seen, reward=float(reward), done=bool(terminated), truncated=bool(truncated))

    def close(self) -> None:
        self._env.close()

    def _seen(self, observation: Any) -> Observation:
        drawn = self._env.render() if self._env.render_mode in ("ansi", "rgb_array") else None
        if isinstance(drawn, str):
            return Observation(drawn)
        text = observation if isinstance(observation, str) else ""
        if drawn is not None:
            from PIL import Image  # only for pictures

            return Observation(text, (Image.fromarray(drawn),))
        plain = observation.tolist() if hasattr(observation, "tolist") else observation
        return Observation(text or f"Observation: {plain}")

    def _describe_actions(self) -> str:
        space = self._env.action_space
        if isinstance(space, self._spaces.Discrete):
            numbers = range(int(space.start), int(space.start + space.n))
            return f"Actions: {', '.join(self._actions or map(str, numbers))}"
        if isinstance(space, self._spaces.Box):
            return f"An action is {space.shape[0] if space.shape else 1} number(s)."
        return ""

    def _read(self, action: str) -> Any:
        space = self._env.action_space
        if isinstance(space, self._spaces.Text):
            return action.strip()
        if isinstance(space, self._spaces.Discrete):
            if not self._actions:
                numbers = [int(number) for number in re.findall(r"-?\d+", action)]
                return next((one for one in reversed(numbers) if 0 <= one - space.start < space.n), None)
            places = {name: action.lower().rfind(name.lower()) for name in self._actions}
            name = max(places, key=lambda one: (places[one], len(one)))
            return int(space.start) + self._actions.index(name) if places[name] >= 0 else None
        if isinstance(space, self._spaces.Box):
            import numpy as np

            found = [float(number) for number in _NUMBER.findall(action)]
            size = int(np.prod(space.shape)) or 1
            if len(found) < size:
                return None
            return np.array(found[-size:], dtype=space.dtype).reshape(space.shape)
        raise EnvironmentFailure(f"actions of {type(space).__name__} cannot be read from text")


make = TextGymnasium  # as `episode` creates the environment of any family
