"""Environments whose steps have effects outside of the object, and in which a run can crash."""

from slime.agent.environments.protocol import StepResult
from slime.utils.errors import RunStopped

TURNS = 4
effects: list[str] = []
crash = {"at": None, "after_step": False}


class Counter:
    """`TURNS` turns; every step has an effect outside of the object."""

    def reset(self, item):
        self.turn = 0
        return "go"

    def step(self, action, call_id):
        if crash["at"] == self.turn and not crash["after_step"]:
            raise RunStopped("the crash, before the effect")
        effects.append(call_id)
        if crash["at"] == self.turn:
            raise RunStopped("the crash, after the effect")
        self.turn += 1
        return StepResult(f"turn {self.turn}", reward=1.0, done=self.turn == TURNS)


class Saving(Counter):
    def save(self):
        return {"turn": self.turn}

    def restore(self, item, state):
        self.turn = state["turn"]


class Repeatable(Saving):
    repeatable = True


class Pure(Counter):
    deterministic = True
