"""`slime plan`: show which engine runs on which GPUs, or the memory and time of a run."""

import argparse
import functools
import json
from collections.abc import Sequence
from dataclasses import asdict

from slime.arguments import explain_batch
from slime.arguments.groups.topology import Topology, plain_topology, prefill_topology, read_topology
from slime.arguments.parser import parse_args
from slime.catalog.gpus import GPUS
from slime.cli.bounded_numbers import MOST_GPUS, MOST_TOKENS, between
from slime.cli.main import RUN_STOPPED, user_errors
from slime.engines.launch_plan import EnginePlace, gpu_pool, place_engines, plan_router, render_plan
from slime.engines.sglang.command import SGLangOptions, server_words
from slime.preflight.trainer_plan import GIB
from slime.utils.machine.own_command import as_typed


def main(argv: Sequence[str] | None = None) -> int:
    words = list(argv or ())
    if any(word.partition("=")[0] == "--gpus" for word in words):
        with user_errors():
            typed = as_typed("simulate", "--gpus", "N", "--model", "NAME")
            raise ValueError(f"--gpus is not a flag of this command: `{typed}` tries the splits of N GPUs.")
    options, others = _parser().parse_known_args(words)
    if options.config or others:
        return plan_whole_run(words)
    with user_errors():
        topology = _topology(options)
        if any(model.is_disaggregated for model in topology.models):
            options.rollout_router = "sglang"  # as such a run does
        num_machines = -(-topology.num_gpus // options.num_gpus_per_node)
        places = place_engines(topology, gpu_pool(num_machines, options.num_gpus_per_node, 0))
        words_of = functools.partial(_server_words, topology)
        if options.json:
            engines = [{**asdict(place), "command": words_of(place)} for place in places]
            routers = [asdict(plan_router(model, options.rollout_router)) for model in topology.models]
            plan = {"num_gpus": topology.num_gpus, "engines": engines, "routers": routers}
            print(json.dumps(plan, indent=2))
        else:
            launch = ["python", "-m", "sglang.launch_server"]
            router = options.rollout_router
            print(render_plan(topology, places, router, lambda place: [*launch, *words_of(place)]))
    return 0


def plan_whole_run(words: list[str]) -> int:
    """Plan a run of `slime train`, given as a file or flags: its memory and time, and whether it fits."""
    parser = argparse.ArgumentParser(prog="slime plan", add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--gpu", choices=tuple(GPUS), help="kind of GPU [that of this machine]")
    memory = "memory of a GPU in GiB: check whether it fits"
    add("--gpu-gib", type=between(0.001, 1e6), metavar="N", help=memory)
    mean = "mean response length [half of the limit]"
    add("--response-tokens", type=between(1, MOST_TOKENS), help=mean)
    add("--json", action="store_true", help="print JSON")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime plan",
        description=__doc__.partition(":")[2].strip(),
        epilog="`slime simulate --gpus N --model NAME` finds the best train:rollout split of N GPUs.",
        allow_abbrev=False,
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
    add("--rollout-router", choices=("builtin", "sglang"), default="builtin", help="[builtin]")
    add("--config", metavar="FILE", help="plan memory and time of a `slime train` run; its flags may follow")
    add("--json", action="store_true", help="print JSON")
    return parser


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
            "give --config run.yaml for a whole run; for engines --topology FILE, or --hf-checkpoint and "
            "--rollout-num-gpus."
        )
    size = (options.hf_checkpoint, options.rollout_num_gpus, options.rollout_num_gpus_per_engine)
    servers = options.prefill_num_servers
    return prefill_topology(*size, servers) if servers else plain_topology(*size)


def _server_words(topology: Topology, place: EnginePlace) -> list[str]:
    path = next(model.model_path for model in topology.models if model.name == place.model)
    assert path is not None, "a model without a path has no engines"
    options = SGLangOptions(
        *("python", path, False, "bfloat16", place.num_gpus, 1234, False),
        node=place.node,
        num_nodes=place.num_nodes,
        extra=place.words,
    )
    return server_words(options)
