"""Workload of a simulated run: prompts, response lengths, rewards and faults."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.arguments import PluginArgs
from slime.data.mix import mix64
from slime.record import Select, open_record
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.prompt_groups import Group
from slime.utils.reward_failure import RewardFailure, infra_error
from slime.utils.types import Sample

PROMPTS, REWARD = f"{__name__}.ModelledPrompts", f"{__name__}.modelled_reward"


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Distribution of response lengths. `kind` "list": uniform over `values`; else `values` are parameters.

    Example: LengthModel("lognormal", (900.0, 1.0), 8192) has mean 900 before truncation, and sigma 1 in the
    logarithm.
    """

    kind: str
    values: tuple[float, ...]
    most: float
    seed: int = 0

    @classmethod
    def parse(cls, text: str, most: float, seed: int) -> LengthModel:
        """Read `fixed:900`, `uniform:100:1000`, `lognormal:900:1.0`, or `run:FOLDER`."""
        kind, _, rest = text.partition(":")
        if kind == "run":
            return cls("list", tuple(lengths_of_run(Path(rest))), most, seed)
        counts = {"fixed": 1, "uniform": 2, "lognormal": 2}
        try:
            values = tuple(float(word) for word in rest.split(":"))
        except ValueError:
            values = ()
        is_empty = kind == "uniform" and values != tuple(sorted(values))
        if is_empty or len(values) != counts.get(kind) or not all(0 < value < math.inf for value in values):
            raise ValueError(
                f"--lengths {text!r} is none of fixed:N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA, "
                "run:FOLDER, with numbers above 0 and LOW no higher than HIGH."
            )
        return cls(kind, values, most, seed)

    def answer(self, seed: int) -> float:
        """A length above `most` is returned as it is: the caller truncates it."""
        draw = random.Random(mix64(self.seed, seed))
        match self.kind:
            case "fixed":
                length = self.values[0]
            case "uniform":
                length = draw.uniform(*self.values)
            case "lognormal":
                mean, sigma = self.values
                length = draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
            case _:
                length = draw.choice(self.values)
        return max(1.0, length)

    @property
    def mean(self) -> float:
        """Mean response length after truncation."""
        return sum(min(self.most, self.answer(i)) for i in range(2000)) / 2000


def lengths_of_run(folder: Path) -> list[float]:
    """Return the lengths of all responses in the record of a run."""
    with open_record(folder) as record:
        samples = record.samples(Select(kind="train", limit=1_000_000))
    found = [float(sample.num_tokens) for sample in samples]
    if not found:
        raise ValueError(f"{folder} has no recorded responses: it was run with --record-max-mib 0.")
    return found


@dataclass(frozen=True, slots=True)
class RewardModel:
    """Models rewards: seconds per score (log-normal around `mean_s`), accuracy and rate of failures."""

    mean_s: float = 0.0
    sigma: float = 0.0
    failures: float = 0.0
    seed: int = 0

    def seconds(self, sample: Sample) -> float:
        if not self.mean_s or not self.sigma:
            return self.mean_s
        draw = random.Random(mix64(self.seed, 1, sample.index or 0))
        return draw.lognormvariate(math.log(self.mean_s) - self.sigma**2 / 2, self.sigma)

    def score(self, sample: Sample, draw: random.Random) -> float | RewardFailure:
        if draw.random() < self.failures:
            return infra_error("an injected failure")
        easy = random.Random(mix64(self.seed, 2, sample.group_index or 0)).random()
        return float(draw.random() < easy)


@dataclass(frozen=True, slots=True)
class Fault:
    """The death of a process at a virtual time. `kind`: engine, trainer or driver; `which`: engine number."""

    at: float
    kind: str
    which: int = 0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults with their virtual times, and the seconds that each restart takes."""

    faults: tuple[Fault, ...] = ()
    engine_restart_s: float = 60.0
    run_restart_s: float = 120.0


@dataclass
class Workload:
    """The whole workload. `unit`: number of real tokens that one simulated token represents."""

    lengths: LengthModel
    prompt_tokens: float
    rewards: RewardModel = field(default_factory=RewardModel)
    faults: FaultPlan = field(default_factory=FaultPlan)
    unit: int = 1
    seed: int = 0
    draws: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.seed)


_current: Workload | None = None


def use(workload: Workload | None) -> None:
    """Set the workload of the plug-ins below, for this process."""
    global _current
    _current = workload


def current() -> Workload:
    assert _current is not None, "a simulation sets the workload first"
    return _current


class ModelledPrompts(RolloutDataSourceWithBuffer):
    """A data source with the real buffer, cursor and journal, whose prompts are only lengths."""

    def _make_group(self, prompt: Sample) -> Group:
        count = max(1, round(current().prompt_tokens / current().unit))
        prompt.tokens = [1] * count
        prompt.prompt = f"prompt {self.sample_group_index}"
        return super()._make_group(prompt)


async def modelled_reward(args: PluginArgs, sample: Sample | Sequence[Sample], **_: Any) -> Any:
    """The reward of a simulated answer, for --custom-rm-path."""
    samples = [sample] if isinstance(sample, Sample) else list(sample)
    model, draws = current().rewards, current().draws
    seconds = max(model.seconds(one) for one in samples)
    if seconds:
        await asyncio.sleep(seconds)
    scores = [model.score(one, draws) for one in samples]
    return scores[0] if isinstance(sample, Sample) else scores
