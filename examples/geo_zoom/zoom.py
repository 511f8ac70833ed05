"""An environment with a tool that returns pictures: look at one of four covered fields, then name its colour.

The first picture has four dark fields, one of them marked by a lighter grey. The policy writes the number of
a field; the tool uncovers it and returns its picture; the policy writes the colour of the marked field.
"""

import random
from typing import Any

from slime.agent.environments.protocol import Item, Observation, StepResult

COLOURS = {"r": (220, 40, 40), "g": (40, 200, 60), "b": (50, 60, 220)}
LIGHTS, GREYS, MARK = (0.6, 0.8, 1.0), (30, 50, 70), 210
FIELD = 32  # pixels


class Zoom:
    deterministic = True

    def reset(self, item: Item) -> Observation:
        rng = random.Random(f"{item.seed}")
        self.marked = rng.randrange(4)
        self.fields = [(rng.choice(list(COLOURS)), rng.choice(LIGHTS)) for _ in range(4)]
        self.looked = False
        return Observation("", images=(covered(self.marked, rng),))

    def step(self, action: str) -> StepResult:
        action = action.strip()
        if self.looked:
            return StepResult(reward=float(action == self.fields[self.marked][0]), done=True)
        if action not in ("1", "2", "3", "4"):
            return StepResult(done=True, tool_calls=1, tool_errors=1)
        self.looked, place = True, int(action) - 1
        seen = Observation("", images=(uncovered(*self.fields[place]),), role="tool")
        return StepResult(seen, tool_calls=1, info={"looked_at_the_marked_field": place == self.marked})


def covered(marked: int, rng: random.Random) -> Any:
    """Four grey fields, one of which is marked."""
    from PIL import Image

    fields = Image.new("L", (2, 2))
    fields.putdata([MARK if place == marked else rng.choice(GREYS) for place in range(4)])
    return fields.resize((2 * FIELD, 2 * FIELD), Image.Resampling.NEAREST).convert("RGB")


def uncovered(colour: str, light: float) -> Any:
    """One field, enlarged."""
    from PIL import Image

    return Image.new("RGB", (2 * FIELD, 2 * FIELD), tuple(int(light * part) for part in COLOURS[colour]))
