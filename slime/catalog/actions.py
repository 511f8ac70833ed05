"""Actions that users can request of an active run; the loop executes them between two steps."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """One action. `setting`: the flag whose value it changes; None: it changes no flag.

    `of_engine`: its value is the address of an engine.
    """

    title: str
    what: str
    setting: str | None = None
    of_engine: bool = False
    low: float = 0.0  # a value must be above it
    high: float = math.inf  # and not above this

    def wrong_value(self, value: float | str | None) -> str | None:
        """Return why a value is not valid; None: it is."""
        if self.of_engine:
            return None if isinstance(value, str) else "it takes an address, host:port"
        if isinstance(value, str):
            return f"{value!r} is not a number"
        if self.setting is None:
            return None if value is None else "it takes no value"
        if value is None or not math.isfinite(value) or not self.low < value <= self.high:
            limit = f" and at most {self.high:g}" if math.isfinite(self.high) else ""
            return f"--{self.setting.replace('_', '-')} must be a number above {self.low:g}{limit}"
        return None


ACTIONS: dict[str, Action] = {
    "checkpoint": Action("Checkpoint now", "write a checkpoint after this step"),
    "evaluate": Action("Evaluate now", "run the evaluation after this step"),
    "pause": Action("Pause", "wait after this step until you resume the run"),
    "resume": Action("Resume", "continue after a pause"),
    "stop": Action("Stop cleanly", "end after this step, with a checkpoint where the run keeps them"),
    "add_engine": Action("Add an engine", "generate with this engine, too", of_engine=True),
    "remove_engine": Action("Remove an engine", "generate without this engine", of_engine=True),
    "lr": Action("Learning rate", "the learning rate from the next step on (--lr)", "lr"),
    "temperature": Action(
        "Temperature", "the temperature of sampling (--rollout-temperature)", "rollout_temperature", high=10.0
    ),
    "clip": Action("Clip", "how far a step may move a token's probability (--eps-clip)", "eps_clip"),
    "clip_high": Action("Clip, upper side", "the clip for rises only (--eps-clip-high)", "eps_clip_high"),
}
