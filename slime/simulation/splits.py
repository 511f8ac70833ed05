"""Finds the splits of a run's GPUs between training and generation that have a place on its machines."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass, replace

from slime.arguments import Args
from slime.arguments.core.draft import is_given
from slime.arguments.core.flag import option_of
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
from slime.runtime.placement import by_engine, plan_placement
from slime.simulation.costs import Costs, TrainerCost
from slime.simulation.workload import LengthModel

_PARTS = 8
_MOST = 32  # GPUs of an engine that is tried


@dataclass(frozen=True, slots=True)
class Split:
    """A split whose trainer and engines have a place. `generate` 0: both take turns on the same GPUs."""

    train: int
    generate: int
    layout: str  # of the trainer
    flags: str  # with which `slime train` places it
    costs: Costs


def find_splits(
    args: Args, options: argparse.Namespace, lengths: LengthModel, about: list[str]
) -> list[Split]:
    """Return the splits to simulate: those of --gpus, or the run's own. Reasons of others go to `about`."""
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
    per_machine = args.num_gpus_per_node if is_given(args.sources["num_gpus_per_node"]) else None
    machine = per_machine or GPUS[options.gpu].per_node
    varies, found = options.gpus is not None, []
    given = not varies and is_given(args.sources["rollout_num_gpus_per_engine"])
    sizes = {args.rollout_num_gpus_per_engine} if given else range(1, 1 + _MOST)
    for train, generate in shares:
        there = generate or train
        gpu = replace(GPUS[options.gpu].among(train + generate), per_node=machine)
        trainer = best_training(model, gpu, train, work)
        plans = engine_plans(model, gpu, work, most=there)
        engines = [plan for plan in plans if there % plan.gpus == 0 and plan.gpus in sizes]
        if trainer is None or not engines:
            about.append(f"{train} + {generate} GPUs: the model does not fit")
            continue
        places = {e.gpus: flags for e in engines if (flags := _place(args, train, generate, e, varies))}
        if not places:
            tried = " or ".join(str(e.gpus) for e in engines)
            about.append(
                f"{train} + {generate} GPUs: no place for engines of {tried} on machines of {machine}"
            )
            continue
        placed = [engine for engine in engines if engine.gpus in places]
        engine = min(placed, key=lambda e: e.generate_s(work, samples / (there // e.gpus)))
        costs = _costs(engine, there, trainer, model, work, gpu, colocated=not generate)
        found.append(Split(train, generate, trainer.words, places[engine.gpus], costs))
    if not found:
        why = "; ".join(about[2:])
        raise ValueError(f"no split of --gpus {options.gpus or own} {options.gpu} can be used ({why}).")
    return found


def _place(args: Args, train: int, generate: int, engine: EnginePlan, varies: bool) -> str | None:
    """Return the flags with which `slime train` has a place for this split; None: it has none.

    `varies`: over any number of training machines, else over the run's own.
    """
    each, total, machine = engine.gpus, generate or train, engine.gpu.per_node
    machines = max(-(-(train + generate) // machine), 1 if varies else args.actor_num_nodes)
    # An engine that nobody chose would be SGLang where it must span machines.
    kind = args.rollout_engine if is_given(args.sources["rollout_engine"]) else "sglang"
    for nodes in range(-(-train // machine), machines + 1) if varies else (args.actor_num_nodes,):
        if train % nodes:
            continue
        sizes = {
            "actor_num_nodes": nodes,
            "actor_num_gpus_per_node": train // nodes,
            "rollout_num_gpus": total,
            "rollout_num_gpus_per_engine": each,
        }
        topology = plain_topology(args.hf_checkpoint, total, each)
        run = args.replace(**sizes, num_gpus_per_node=machine, rollout_engine=kind, engine_topology=topology)
        with contextlib.suppress(ValueError):
            engines = by_engine(plan_placement(run, machine, machines).engines)
            # The costs of an engine that fits on a machine are those of one that lies there.
            if each > machine or all(len(parts) == 1 for parts in engines):
                flags = " ".join(f"{option_of(name)} {value}" for name, value in sizes.items())
                return flags if generate else f"{flags} --colocate"
    return None


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
