"""Environments of tests, as a user would write them; `--env environments_under_test:Countdown`."""

import asyncio
import threading

from slime.agent.environments.protocol import Observation, StepResult

released = threading.Event()  # ends what hangs, so that a test leaves no thread behind
threads: list[tuple[int, str]] = []  # (object, thread) of each call
made: list[object] = []


class Countdown:
    """`turns` turns; each earns 1 where the answer has an even number of characters, and the end `bonus`."""

    deterministic = True

    def __init__(self, turns=3, bonus=0.5):
        self.left, self.bonus = turns, bonus
        self.steps = 0
        made.append(self)

    def reset(self, item):
        threads.append((id(self), threading.current_thread().name))
        return Observation(f"go {item.seed % 7}", system="be brief")

    def step(self, action):
        threads.append((id(self), threading.current_thread().name))
        self.left -= 1
        self.steps += 1
        return StepResult(
            f"left {self.left}",
            reward=float(len(action) % 2 == 0),
            done=self.left == 0,
            tool_calls=2,
            tool_errors=1,
            info={"steps": self.steps},
        )

    def score(self):
        return self.bonus


class AsyncCountdown(Countdown):
    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


class Duel:
    """Two players in turn, two turns each; player 1 always wins."""

    num_players = 2

    def reset(self, item):
        self.turn = 0
        return Observation("you are 0", player=0)

    def step(self, action):
        self.turn += 1
        if self.turn == 4:
            return StepResult(done=True)
        return StepResult(Observation(f"turn {self.turn}", player=self.turn % 2))

    def score(self):
        return {0: -1.0, 1: 1.0}


class FromRows:
    """Plays rows of --prompt-data: one turn, right by the label."""

    def reset(self, item):
        assert item.prompt.startswith("q") and item.label is not None
        self.label = item.label
        return f"row {item.prompt}"

    def step(self, action):
        return StepResult(reward=float(self.label), done=True)


class Raises(Countdown):
    def step(self, action):
        raise KeyError("no such door")


class Hangs(Countdown):
    def step(self, action):
        released.wait(60)
        return super().step(action)


class Rubbish(Countdown):
    def step(self, action):
        return {"reward": 1}


class NotANumber(Countdown):
    def step(self, action):
        return StepResult("x", reward=float("nan"))


class Nothing(Countdown):
    def step(self, action):
        return StepResult(None)


class NoStep:
    def reset(self, item):
        return "x"


class Gallery:
    """A picture to begin with, text alone, then two pictures at the places that the text names."""

    def reset(self, item):
        from tiny_vision import make_picture

        self.shown = [make_picture(seed, 64, 48 + 16 * seed) for seed in range(3)]
        self.steps = 0
        return Observation("what is it?", images=(self.shown[0],))

    def step(self, action):
        self.steps += 1
        if self.steps == 2:
            return StepResult(Observation("<image> or <image>?", images=tuple(self.shown[1:])))
        return StepResult("think again", reward=0.5, done=self.steps == 3)


class WrongGallery(Gallery):
    """Shows what is no picture, or names more places than it has pictures."""

    def __init__(self, wrong):
        self.wrong = wrong

    def reset(self, item):
        from tiny_vision import make_picture

        if self.wrong == "bytes":
            return Observation("see", images=(b"hello",))
        if self.wrong == "alone":
            return Observation("see", images=make_picture(0))
        return Observation("<image> and <image>", images=(make_picture(0),))
