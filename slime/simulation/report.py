"""Simulates the splits of a run's GPUs between training and generation, and recommends the best."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from slime.arguments import Args
from slime.arguments.groups.topology import plain_topology
from slime.simulation.simulated_run import Measured, Simulation
from slime.simulation.simulated_settings import simulated_args, unit_for
from slime.simulation.splits import Split, find_splits
from slime.simulation.workload import LengthModel, RewardModel, Workload


@dataclass(frozen=True, slots=True)
class SplitRow:
    """One split and its simulation."""

    split: Split
    measured: Measured


def simulate_splits(args: Args, options: argparse.Namespace) -> tuple[list[SplitRow], list[str]]:
    """Run one simulation for each split; return them fastest first, and the assumptions."""
    overlapped = options.loop != "sync"
    most = float(args.rollout_max_response_len or 4096)
    source = options.lengths or f"lognormal:{most / 4:g}:0.8"
    lengths = LengthModel.parse(source, most, options.seed)
    unit = unit_for(lengths.mean)
    mean, _, sigma = options.reward_s.partition(":")
    rewards = RewardModel(float(mean), float(sigma or 0), options.reward_failures, options.seed)
    about = [
        f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} responses of about "
        f"{lengths.mean:.0f} tokens ({source}), {options.steps} steps, "
        f"seed {options.seed}; one token stands for {unit}"
    ]
    rows = []
    for found in find_splits(args, options, lengths, about):
        costs = found.costs
        workload = Workload(lengths, options.prompt_tokens, rewards, unit=unit, seed=options.seed)
        each = args.rollout_num_gpus_per_engine
        split = args.replace(
            rollout_num_gpus=costs.num_engines * each,
            engine_topology=plain_topology(args.hf_checkpoint, costs.num_engines * each, each),
            sglang_server_concurrency=min(args.sglang_server_concurrency, costs.engine.max_running),
        )
        small = simulated_args(split, steps=options.steps, unit=unit, keeps=False)
        simulation = Simulation(small, costs, workload, overlapped=overlapped)
        simulation.run()
        rows.append(SplitRow(found, simulation.shares()))
    return sorted(rows, key=lambda row: row.measured.step_s), about


def table(rows: Sequence[SplitRow]) -> list[str]:
    lines = [
        "GPUs that      number of requests         engines trainer",
        "train generate   engines  of each  step s    busy    busy wasted  staleness, %",
    ]
    for row in rows:
        split, found = row.split, row.measured
        ages = " ".join(f"{age}:{100 * share:.0f}" for age, share in found.staleness.items()) or "-"
        lines.append(
            f"{split.train:>5} {split.generate or 'the same':>8} {split.costs.num_engines:>9} "
            f"{found.engine_running:>8.0f} {found.step_s:>7.4g} {found.engine_busy:>7.0%} "
            f"{found.trainer_busy:>7.0%} {found.wasted:>6.1%}  {ages}"
        )
    best, split = rows[0], rows[0].split
    if len(rows) > 1:
        lines.append(
            f"best: {split.train} GPUs train, {split.generate} generate: {best.measured.step_s:.4g} s a step"
        )
    lines.append(f"trainer: {split.layout}")
    lines += textwrap.wrap(f"flags: {split.flags}", 80, subsequent_indent="  ", break_on_hyphens=False)
    counts = {name: int(n) for name, n in sorted(best.measured.counts.items()) if n}
    counted = ", ".join(f"{name.removeprefix('groups/').replace('_', ' ')} {n}" for name, n in counts.items())
    lines.append(f"groups of the {'best' if len(rows) > 1 else 'run'}: {counted or 'none'}")
    lost = {cause.replace("_", " "): n for cause, n in best.measured.waste.items() if n}
    made = max(best.measured.engine_tokens, 1.0)
    shares = ", ".join(f"{cause} {n / made:.1%}" for cause, n in sorted(lost.items()))
    lines.append(f"tokens without a learning signal: {shares or 'none'}")
    return lines
