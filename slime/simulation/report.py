"""Simulates the splits of a run's GPUs between training and generation, and recommends the best."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from slime.arguments import Args
from slime.arguments.groups.topology import plain_topology
from slime.catalog.gpus import GPUS, GpuRow
from slime.preflight.step_costs import (
    ASSUMPTIONS,
    PAUSE_S,
    SWAP_S,
    EnginePlan,
    Model,
    TrainPlan,
    Work,
    best_training,
    engine_plans,
    model_of,
    push_seconds,
)
from slime.simulation.costs import Costs, TrainerCost
from slime.simulation.simulated_run import Measured, Simulation
from slime.simulation.simulated_settings import simulated_args, unit_for
from slime.simulation.workload import LengthModel, RewardModel, Workload

_PARTS = 8


@dataclass(frozen=True, slots=True)
class SplitRow:
    """One split. `rollout_gpus` 0: engines and trainer share the GPUs in turns."""

    train_gpus: int
    rollout_gpus: int
    engines: int
    layout: str  # of the trainer
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
    for train, rollout, layout, costs in _splits(args, options, lengths, about):
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
        rows.append(SplitRow(train, rollout, costs.num_engines, layout, simulation.shares()))
    return sorted(rows, key=lambda row: row.measured.step_s), about


def _splits(
    args: Args, options: argparse.Namespace, lengths: LengthModel, about: list[str]
) -> list[tuple[int, int, str, Costs]]:
    own, rollout = args.actor_num_nodes * (args.actor_num_gpus_per_node or 1), args.rollout_num_gpus or 1
    if options.gpu not in GPUS:
        raise ValueError(f"--gpu {options.gpu!r} is none of {', '.join(GPUS)}.")
    model = model_of(options.model or args.hf_checkpoint or "")
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    spread = 0.0 if lengths.kind == "fixed" else 0.8
    steps = args.num_steps_per_rollout
    passes = int(steps > 1) + int(bool(args.use_kl_loss or args.kl_coef))
    work = Work(samples, options.prompt_tokens, lengths.mean, spread, lengths.most, passes, steps)
    about.append(
        f"costs: {model.parameters / 1e9:.1f}B parameters on {options.gpu}; {'; '.join(ASSUMPTIONS)}"
    )
    if args.colocate:
        shares = [(options.gpus or own, 0)]
    elif options.gpus is None:
        shares = [(own, rollout)]
    elif options.gpus == 1:
        raise ValueError("--gpus 1 cannot be split: give two or more, or --colocate to let both take turns.")
    else:
        parts = [options.gpus * part // _PARTS for part in range(1, _PARTS)]
        shares = [(options.gpus - part, part) for part in dict.fromkeys(parts) if 0 < part < options.gpus]
    found = []
    for train, generate in shares:
        there = generate or train
        gpu = GPUS[options.gpu].among(train + generate)
        trainer = best_training(model, gpu, train, work)
        engines = [e for e in engine_plans(model, gpu, work, most=there) if there % e.gpus == 0]
        if trainer is None or not engines:
            about.append(f"{train} + {generate} GPUs: the model does not fit")
            continue
        engine = min(engines, key=lambda e: e.generate_s(work, samples / (there // e.gpus)))
        costs = _costs(engine, there, trainer, model, work, gpu, colocated=not generate)
        found.append((train, generate, trainer.words, costs))
    if not found:
        raise ValueError(f"no split of --gpus {options.gpus or own} {options.gpu} holds this model.")
    return found


def _costs(
    engine: EnginePlan,
    gpus: int,
    trainer: TrainPlan,
    model: Model,
    work: Work,
    gpu: GpuRow,
    *,
    colocated: bool,
) -> Costs:
    compute, dp = trainer.parts["compute"], trainer.sizes.dp
    lengths = [work.prompt + n for n in work.lengths()]
    pairs = model.attention * sum(n * n for n in lengths) / model.forward_flops(lengths)
    each = work.samples / dp / len(lengths)  # samples of a rank for each of these lengths
    push = push_seconds(model, gpu, trainer.sizes.ranks + (0 if colocated else gpus), apart=not colocated)
    swap = SWAP_S / 2 if colocated else 0.0
    cost = TrainerCost(
        dp_size=dp,
        fixed_s=trainer.seconds - compute,
        per_token_s=compute * (1 - pairs) / (each * sum(lengths)),
        per_pair_s=compute * pairs / (each * sum(n * n for n in lengths)),
        push_s=max(0.0, push - PAUSE_S),
        swap_s=swap,
        save_s=16 * model.parameters / (trainer.sizes.ranks * 1e9),
    )
    return Costs(gpus // engine.gpus, engine, cost, pause_s=PAUSE_S, swap_s=swap)


def table(rows: Sequence[SplitRow]) -> list[str]:
    lines = [
        "GPUs that      number of requests         engines trainer",
        "train generate   engines  of each  step s    busy    busy wasted  staleness, %",
    ]
    for row in rows:
        found = row.measured
        ages = " ".join(f"{age}:{100 * share:.0f}" for age, share in found.staleness.items()) or "-"
        lines.append(
            f"{row.train_gpus:>5} {row.rollout_gpus or 'the same':>8} {row.engines:>9} "
            f"{found.engine_running:>8.0f} {found.step_s:>7.4g} {found.engine_busy:>7.0%} "
            f"{found.trainer_busy:>7.0%} {found.wasted:>6.1%}  {ages}"
        )
    best = rows[0]
    if len(rows) > 1:
        lines.append(
            f"best: {best.train_gpus} GPUs train, {best.rollout_gpus} generate: "
            f"{best.measured.step_s:.4g} s a step"
        )
    lines.append(f"trainer: {best.layout}")
    counts = {name: int(n) for name, n in sorted(best.measured.counts.items()) if n}
    counted = ", ".join(f"{name.removeprefix('groups/').replace('_', ' ')} {n}" for name, n in counts.items())
    lines.append(f"groups of the {'best' if len(rows) > 1 else 'run'}: {counted or 'none'}")
    lost = {cause.replace("_", " "): n for cause, n in best.measured.waste.items() if n}
    made = max(best.measured.engine_tokens, 1.0)
    shares = ", ".join(f"{cause} {n / made:.1%}" for cause, n in sorted(lost.items()))
    lines.append(f"tokens without a learning signal: {shares or 'none'}")
    return lines
