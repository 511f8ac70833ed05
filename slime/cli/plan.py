"""`slime plan`: show which engine runs on which GPUs, and the memory and time of a trainer layout."""

import argparse
import functools
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from slime.arguments import explain_batch
from slime.arguments.groups.topology import Topology, plain_topology, prefill_topology, read_topology
from slime.arguments.groups.training import MOMENT_BYTES
from slime.arguments.parser import parse_args
from slime.catalog.gpus import GPUS
from slime.cli.bounded_numbers import MOST_GPUS, MOST_TOKENS, between
from slime.cli.main import RUN_STOPPED, user_errors
from slime.engines.launch_plan import EnginePlace, gpu_pool, place_engines, plan_router, render_plan
from slime.engines.sglang.command import SGLangOptions, server_words
from slime.preflight.trainer_plan import (
    GIB,
    Sizes,
    TrainerPlan,
    known_shape,
    plan_trainer,
    read_model,
    render,
)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(argv or ())
    if any(word.partition("=")[0] == "--gpus" for word in words):
        return plan_scale(words)
    if any(word.partition("=")[0] in ("--config", "--rollout-batch-size") for word in words):
        return plan_whole_run(words)
    options = _parser().parse_args(words)
    with user_errors():
        trainer = _trainer(options)
        if trainer is not None and options.topology is None and options.rollout_num_gpus is None:
            print(json.dumps({"trainer": asdict(trainer)}, indent=2) if options.json else render(trainer))
            return _verdict(trainer, options.gpu_gib)
        topology = _topology(options)
        if any(model.is_disaggregated for model in topology.models):
            options.rollout_router = "sglang"  # as such a run does
        num_machines = -(-(options.first_gpu + topology.num_gpus) // options.num_gpus_per_node)
        gpus = [] if options.cpu else gpu_pool(num_machines, options.num_gpus_per_node, options.first_gpu)
        places = place_engines(topology, gpus)
        words_of = functools.partial(_server_words, topology, cpu=options.cpu)
        if options.json:
            engines = [{**asdict(place), "command": words_of(place)} for place in places]
            routers = [asdict(plan_router(model, options.rollout_router)) for model in topology.models]
            plan = {"num_gpus": topology.num_gpus, "engines": engines, "routers": routers}
            print(json.dumps(plan | ({"trainer": asdict(trainer)} if trainer else {}), indent=2))
        else:
            launch = ["python", "-m", "sglang.launch_server"]
            router = options.rollout_router
            text = render_plan(topology, places, router, lambda place: [*launch, *words_of(place)])
            print(text + (f"\n{render(trainer)}" if trainer else ""))
    return 0


def plan_whole_run(words: list[str]) -> int:
    """Plan a run of `slime train`, given as a file or flags: its memory and time, and whether it fits."""
    parser = argparse.ArgumentParser(prog="slime plan", add_help=False, allow_abbrev=False)
    _add_device(parser)
    parser.add_argument("--gpu", choices=tuple(GPUS), help="kind of GPU [that of this machine]")
    mean = "mean response length [half of the limit]"
    parser.add_argument("--response-tokens", type=between(1, MOST_TOKENS), help=mean)
    options, words = parser.parse_known_args(words)
    with user_errors():
        args = parse_args(words)
        # Imported here: it loads torch.
        from slime.preflight.prompts import usual_length
        from slime.preflight.run_plan import Device, plan_run

        device = Device.here()
        if options.gpu or options.gpu_gib:
            room = options.gpu_gib * GIB if options.gpu_gib else GPUS[options.gpu].capacity
            device = Device(room, True, options.gpu or "")
        plan = plan_run(args, device, usual_length(args), options.response_tokens)
        fits = plan.peak <= device.room
        if options.json:
            print(json.dumps(asdict(plan) | {"peak": plan.peak, "room": device.room, "fits": fits}, indent=2))
        else:
            print("\n".join([explain_batch(args), *plan.lines(device.room)]))
    return 0 if fits else RUN_STOPPED


def plan_scale(words: list[str]) -> int:
    """Find the best layout and train:rollout split of N GPUs with a cost model."""
    parser = argparse.ArgumentParser(prog="slime plan", description=plan_scale.__doc__)
    add = parser.add_argument
    add("--gpus", type=between(1, MOST_GPUS, int), required=True, help="GPUs of the whole run")
    add("--model", required=True, help="model name, such as deepseek-v3, or a folder with config.json")
    add("--gpu", default="h200", choices=tuple(GPUS), help="[h200]")
    tokens = between(1, MOST_TOKENS)
    add("--samples", type=between(1, 1e9, int), default=2048, help="responses per rollout [2048]")
    add("--prompt-tokens", type=tokens, default=256.0, help="mean prompt length [256]")
    add("--answer-tokens", type=tokens, default=4096.0, help="mean response length [4096]")
    add("--longest", type=tokens, default=None, help="longest response [8 times the mean]")
    add("--spread", type=between(0, 10), default=0.8, help="sigma of the log of response lengths [0.8]")
    add("--optimizer-steps", type=between(1, 1e6, int), default=1, help="per rollout [1]")
    add("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    with user_errors():
        # Imported here: it loads torch, which other plans do not need.
        from slime.preflight.step_costs import Work, best_on_fewer, best_runs, model_of, run_lines

        model = model_of(options.model)
        longest = options.longest or 8 * options.answer_tokens
        if longest < options.answer_tokens:
            mean = f"--answer-tokens {options.answer_tokens:g}"
            raise ValueError(f"--longest {longest:g} is below the mean length, {mean}.")
        if options.optimizer_steps > options.samples:
            raise ValueError(
                f"--optimizer-steps {options.optimizer_steps}: a rollout has only {options.samples} samples "
                "(--samples), and every step needs one."
            )
        work = Work(
            *(options.samples, options.prompt_tokens, options.answer_tokens, options.spread, longest),
            *(int(options.optimizer_steps > 1), options.optimizer_steps),
        )
        runs = best_runs(model, GPUS[options.gpu], options.gpus, work)
        fewer = best_on_fewer(model, GPUS[options.gpu], options.gpus, work)
        if not runs:
            why = "fits; use more of them."
            if fewer is not None:
                other = f"--gpus {fewer.gpus} has one, with a step of {fewer.step_s:.1f} s."
                why = f"uses exactly this number; {other}"
            raise ValueError(f"--gpus {options.gpus}: no layout of {options.model} {why}")
        if options.json:
            rows = [
                {
                    "way": run.way,
                    "rollout_gpus": run.rollout_gpus,
                    "step_s": run.step_s,
                    "generate_s": run.generate_s,
                    "train_s": run.trainer.parts,
                    "push_s": run.push_s,
                    "layout": asdict(run.trainer.sizes),
                    "engine_gpus": run.engine.gpus,
                }
                for run in runs
            ]
            print(json.dumps(rows, indent=2))
        else:
            for line in run_lines(model, options.gpu, runs, work, fewer):
                print("\n".join(textwrap.wrap(line, 80, subsequent_indent="    ")))
    return 0


def _verdict(trainer: TrainerPlan, gpu_gib: float | None) -> int:
    if gpu_gib is None:
        return 0
    most = max(stage.total for stage in trainer.stages) / GIB
    print(f"{'fits' if most <= gpu_gib else 'does not fit'}: {most:.1f} GiB on a GPU of {gpu_gib:g} GiB")
    return 0 if most <= gpu_gib else RUN_STOPPED


def _add_device(parser: argparse.ArgumentParser) -> None:
    memory = "memory of a GPU in GiB: check whether it fits"
    parser.add_argument("--gpu-gib", type=between(0.001, 1e6), metavar="N", help=memory)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime plan",
        description=__doc__.partition(":")[2].strip(),
        epilog="`slime plan --gpus N --model NAME` finds the best layout and train:rollout split of N GPUs; "
        "`slime plan --gpus 8 --help` shows its flags.",
    )
    add, gpus = parser.add_argument, between(1, MOST_GPUS, int)
    add("--topology", "--sglang-config", metavar="FILE", help="the file of --sglang-config")
    add("--hf-checkpoint", metavar="MODEL", help="model of entries without a model_path")
    total = "GPUs of all engines; with --topology: the sum that the file must have"
    add("--rollout-num-gpus", type=gpus, help=total)
    add("--rollout-num-gpus-per-engine", type=gpus, default=1, help="default of the file's entries [1]")
    servers = "as in a training command, instead of a file"
    add("--prefill-num-servers", type=between(0, MOST_GPUS, int), help=servers)
    add("--num-gpus-per-node", type=gpus, default=8, help="GPUs of one machine [8]")
    first = "number of the engines' first GPU; those before it train [0]"
    add("--first-gpu", type=between(0, MOST_GPUS, int), default=0, help=first)
    add("--rollout-router", choices=("builtin", "sglang"), default="builtin", help="[builtin]")
    planned = "a Megatron trainer, planned if --actor-num-gpus-per-node is given"
    _add_trainer(parser.add_argument_group(planned))
    add("--cpu", action="store_true", help="plan for a machine without GPUs")
    add("--config", metavar="FILE", help="plan memory and time of a `slime train` run; its flags may follow")
    _add_device(parser)
    return parser


def _add_trainer(group: argparse._ArgumentGroup) -> None:
    add, count = group.add_argument, between(1, 1e9, int)
    add("--actor-num-nodes", type=count, default=1, help="[1]")
    add("--actor-num-gpus-per-node", type=count)
    pipeline = ("pipeline-model", "virtual-pipeline-model")
    for name in ("tensor-model", *pipeline, "context", "expert-model", "expert-tensor"):
        add(f"--{name}-parallel-size", type=count, default=1, help="[1]")
    for name in ("first", "last"):
        add(f"--num-layers-in-{name}-pipeline-stage", type=count, help="[the same as the others]")
    add("--sequence-parallel", action="store_true")
    add("--no-use-distributed-optimizer", action="store_true", help="whole moments on every rank")
    add("--optimizer-cpu-offload", action="store_true", help="moments in host memory")
    add("--optimizer-offload-fraction", type=between(0, 1), default=1.0, help="share of them [1]")
    for name in ("exp-avg", "exp-avg-sq"):
        add(f"--{name}-dtype", choices=tuple(MOMENT_BYTES), default="fp32", help="[fp32]")
    add("--num-micro-batches", type=count, default=8, help="per rank and optimizer step [8]")
    add("--max-tokens-per-gpu", type=count, default=8192, help="per micro-batch and rank [8192]")
    add("--activation-checkpointing", choices=("none", "full"), default="none", help="[none]")
    load = "load of the busiest expert relative to the mean, as runs log it [2.0]"
    add("--moe-load-max-over-mean", type=float, default=2.0, help=load)


def _trainer(options: argparse.Namespace) -> TrainerPlan | None:
    if options.actor_num_gpus_per_node is None:
        return None
    if options.hf_checkpoint is None:
        raise ValueError("--actor-num-gpus-per-node plans a trainer: also give its model, --hf-checkpoint.")
    if not 1 <= options.moe_load_max_over_mean < math.inf:
        load = options.moe_load_max_over_mean
        raise ValueError(f"--moe-load-max-over-mean is {load}: use at least 1, the mean.")
    sizes = Sizes(
        ranks=options.actor_num_nodes * options.actor_num_gpus_per_node,
        tp=options.tensor_model_parallel_size,
        pp=options.pipeline_model_parallel_size,
        vpp=options.virtual_pipeline_model_parallel_size,
        cp=options.context_parallel_size,
        ep=options.expert_model_parallel_size,
        etp=options.expert_tensor_parallel_size,
        sequence_parallel=options.sequence_parallel,
        distributed_optimizer=not options.no_use_distributed_optimizer,
        first_layers=options.num_layers_in_first_pipeline_stage,
        last_layers=options.num_layers_in_last_pipeline_stage,
    )
    with known_shape(f"--hf-checkpoint {options.hf_checkpoint}"):
        return plan_trainer(read_model(options.hf_checkpoint), sizes, options)


def _topology(options: argparse.Namespace) -> Topology:
    if options.topology:
        if options.prefill_num_servers:
            raise ValueError("--topology and --prefill-num-servers both define the engines; give one.")
        topology = read_topology(options.topology, options.hf_checkpoint, options.rollout_num_gpus_per_engine)
        if options.rollout_num_gpus not in (None, topology.num_gpus):
            raise ValueError(
                f"--rollout-num-gpus is {options.rollout_num_gpus}, but the groups of {options.topology} "
                f"have {topology.num_gpus} GPUs together; use that, or leave it out."
            )
        return topology
    if options.rollout_num_gpus is None or options.hf_checkpoint is None:
        raise ValueError(
            "give --topology FILE, or --hf-checkpoint and --rollout-num-gpus; for a trainer "
            "--actor-num-gpus-per-node."
        )
    size = (options.hf_checkpoint, options.rollout_num_gpus, options.rollout_num_gpus_per_engine)
    servers = options.prefill_num_servers
    return prefill_topology(*size, servers) if servers else plain_topology(*size)


def _server_words(topology: Topology, place: EnginePlace, *, cpu: bool) -> list[str]:
    path = next(model.model_path for model in topology.models if model.name == place.model)
    assert path is not None, "a model without a path has no engines"
    dtype, num_gpus = "float32" if cpu else "bfloat16", place.num_gpus
    return server_words(SGLangOptions("python", path, cpu, dtype, num_gpus, 1234, False, extra=place.words))
