"""Virtual seconds that modelled engines and trainers need for their work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.preflight.step_costs import EnginePlan


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Linear costs: a decode pass takes base_s + running * per_running_s + cached * per_cached_s."""

    base_s: float
    per_running_s: float
    per_cached_s: float
    per_prompt_token_s: float
    max_running: int

    def decode_s(self, running: int, cached: float) -> float:
        return self.base_s + running * self.per_running_s + cached * self.per_cached_s

    def prefill_s(self, tokens: float) -> float:
        return tokens * self.per_prompt_token_s


EngineCosts = EngineCost | EnginePlan  # `running`: concurrent requests; `cached`: tokens in all their caches


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """A rank with samples of lengths l takes fixed_s + sum(l) * per_token_s + sum(l^2) * per_pair_s for a
    step.
    """

    dp_size: int
    fixed_s: float
    per_token_s: float
    per_pair_s: float = 0.0
    push_s: float = 0.0
    save_s: float = 0.0
    swap_s: float = 0.0

    def step_s(self, lengths_by_rank: Sequence[Sequence[float]]) -> float:
        ranks = [
            sum(lengths) * self.per_token_s + sum(n * n for n in lengths) * self.per_pair_s
            for lengths in lengths_by_rank
        ]
        return self.fixed_s + max(ranks, default=0.0)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a run. `pause_s`: how long a push pauses engines; `swap_s`: how long engines take to leave
    the device and return."""

    num_engines: int
    engine: EngineCosts
    trainer: TrainerCost
    pause_s: float = 0.0
    swap_s: float = 0.0
