"""Seconds of modelled engines and trainers: as measured, or from the cost model of `slime plan`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from slime.observability.tracking import read_metrics
from slime.simulation.modelled_engines import EngineCosts


@dataclass(frozen=True, slots=True)
class EngineCost:
    """One engine. A decode pass: `base_s` + running x `per_running_s` + cached tokens x `per_cached_s`."""

    base_s: float
    per_running_s: float
    per_cached_s: float
    per_prompt_token_s: float
    max_running: int

    def decode_s(self, running: int, cached: float) -> float:
        return self.base_s + running * self.per_running_s + cached * self.per_cached_s

    def prefill_s(self, tokens: float) -> float:
        return tokens * self.per_prompt_token_s


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """The trainer. A rank with lengths l needs `fixed_s` + sum(l) `per_token_s` + sum(l^2) `per_pair_s`."""

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
    """All of a run. `pause_s`: engines wait in a push; `swap_s`: their way off the device and back."""

    num_engines: int
    engine: EngineCosts
    trainer: TrainerCost
    pause_s: float = 0.0
    swap_s: float = 0.0


_CALIBRATE = 10  # steps of a real run, after the first, that costs are taken from
_ENGINE_TIME = "perf/engine_forward_time"
_PARTS = ("perf/step_time", "perf/rollout_time", "perf/train_time", "perf/update_weights_time")


def measured_costs(folder: Path, *, slow_rewards: bool = False) -> tuple[Costs, list[str]]:
    """Costs from the first steps of a real run with one engine, and what its later steps took, to compare.

    The engine is taken as one of constant tokens per second, which it is where Python or a full batch bounds
    it. Steps with an evaluation are left out. What a step takes beside its parts is added to training.
    `slow_rewards`: rollouts waited for rewards, which are modelled apart; generating is what the engine
    worked (an embedded one tells), and what it did not is of the rewards.
    """
    steps = _steps_of(folder, (_ENGINE_TIME,) if slow_rewards else ())
    first, later = steps[:_CALIBRATE], steps[_CALIBRATE:]
    step, rollout, train, push = (median(s[name] for s in first) for name in _PARTS)
    samples = median(s["rollout/num_samples"] for s in first)
    answer = median(s["rollout/response_len/mean"] for s in first)
    generating = median(s[_ENGINE_TIME] for s in first) if slow_rewards else rollout
    rate = samples * answer / generating
    other = max(0.0, step - rollout - train - push)
    costs = Costs(
        num_engines=1,
        engine=EngineCost(0.0, 1 / rate, 0.0, 0.0, 1 << 20),
        trainer=TrainerCost(1, train + other, 0.0, push_s=push),
    )
    told = [
        f"costs: {folder}, medians of {len(first)} steps: {generating:.3g} s generating "
        f"({rate:.0f} tokens/s), {train:.3g} training, {push:.3g} pushing, "
        f"{other:.3g} beside them; a step {step:.3g} s"
    ]
    if later:
        after = median(s["perf/step_time"] for s in later)
        told.append(f"measured: the {len(later)} steps after those took {after:.4g} s (median)")
    return costs, told


def _steps_of(folder: Path, also: tuple[str, ...] = ()) -> list[dict[str, float]]:
    """Return the metrics of each step but the first, except steps that evaluated or saved."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(
            f"--measured {folder}: no metrics.jsonl there; name the folder of a run (--run-dir)."
        )
    by_step: defaultdict[int, dict[str, float]] = defaultdict(dict)
    busy: set[int] = set()
    for row in read_metrics(file):
        if "rollout/step" in row:
            by_step[row["rollout/step"]].update(row)
        if "eval/step" in row:
            busy |= {row["eval/step"], row["eval/step"] + 1}  # the time counts for the step that follows
    names = (*_PARTS, "rollout/num_samples", "rollout/response_len/mean", *also)
    found = [
        by_step[n] for n in sorted(by_step)[1:] if n not in busy and all(name in by_step[n] for name in names)
    ]
    if len(found) < 3:
        needed = f" with {', '.join(also)}" if also else ""
        raise ValueError(
            f"--measured {folder}: {len(found)} whole steps{needed} are there; at least 3 are needed."
        )
    return found
