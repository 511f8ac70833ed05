"""`slime plan`: show what lies on which host and GPU, or the memory and time of a run."""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from slime.arguments import explain_batch
from slime.arguments.core.devices import visible_gpus
from slime.arguments.groups.topology import Topology, plain_topology, prefill_topology, read_topology
from slime.arguments.parser import parse_args
from slime.arguments.passthrough.sglang_flags import NOT_HERE
from slime.catalog.gpus import GPUS
from slime.cli.bounded_numbers import MOST_GPUS, MOST_TOKENS, between
from slime.cli.main import RUN_STOPPED, user_errors
from slime.engines.launch_plan import EnginePlace, gpu_pool, place_engines, plan_router, render_plan
from slime.engines.sglang.command import SGLangOptions, server_words
from slime.preflight.trainer_plan import GIB
from slime.runtime.placement import Machine, host_lines, host_rows, num_machines_needed, plan_placement
from slime.utils.machine.described import described_machine
from slime.utils.machine.own_command import as_typed

_PLACE = "show what lies on which host of such a cluster, with --config [as many hosts as the run needs]"
_PER_HOST = 8  # GPUs of a host where nothing else is said


def main(argv: Sequence[str] | None = None) -> int:
    words = list(argv or ())
    if words and not words[0].startswith("-"):
        words = ["--config", *words]
    if any(word.partition("=")[0] == "--gpus" for word in words):
        with user_errors():
            typed = as_typed("simulate", "--gpus", "N", "--model", "NAME")
            raise ValueError(f"--gpus is not a flag of this command: `{typed}` tries the splits of N GPUs.")
    options, others = _parser().parse_known_args(words)
    if options.config or others or options.place is not None:
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
    """Plan a run of `slime train`, given as a file or flags: places, memory and time, and whether it fits."""
    options, words = _run_parser().parse_known_args(words)
    with user_errors():
        room = options.gpu_gib * GIB if options.gpu_gib else None
        if options.gpu and room is None:
            room = GPUS[options.gpu].capacity
        hosts, per_host = _cluster(options.place)
        if options.place is None:
            args = parse_args(words)
            per_host = 0 if room is None and not visible_gpus() else max(per_host, args.num_gpus_per_node)
        else:
            with described_machine(per_host, None if room is None else int(room)):
                args = parse_args(words)
            if args.sglang_python == NOT_HERE:
                print("SGLang is not installed here, so its flags were not checked.", file=sys.stderr)
        if not args.sources["num_gpus_per_node"].startswith("derived"):
            per_host = min(per_host, args.num_gpus_per_node)
        hosts = hosts or num_machines_needed(args, per_host)
        cluster = [Machine(f"host-{i}", tuple(range(per_host))) for i in range(hosts)]
        placed = plan_placement(args, per_host, hosts).on(cluster)
        rows = host_rows(args, placed, hosts) if options.place is not None else []
        if rows and room is None:
            print(json.dumps({"hosts": rows}, indent=2) if options.json else "\n".join(host_lines(rows)))
            return 0
        # Imported here: it loads torch.
        from slime.preflight.prompts import usual_length
        from slime.preflight.run_plan import Device, plan_run

        device = Device.here() if room is None else Device(room, True, options.gpu or "")
        plan = plan_run(args, device, usual_length(args), options.response_tokens)
        fits = plan.peak <= device.room
        if options.json:
            facts = {"peak": plan.peak, "room": device.room, "fits": fits} | ({"hosts": rows} if rows else {})
            print(json.dumps(asdict(plan) | facts, indent=2))
        else:
            print("\n".join([*host_lines(rows), explain_batch(args), *plan.lines(device.room)]))
    return 0 if fits else RUN_STOPPED


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slime plan", add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--place", nargs="?", const="", metavar="HOSTSxGPUS", help=_PLACE)
    add("--gpu", choices=tuple(GPUS), help="kind of GPU [that of this machine]")
    memory = "memory of a GPU in GiB: check whether it fits"
    add("--gpu-gib", type=between(0.001, 1e6), metavar="N", help=memory)
    mean = "mean response length [half of the limit]"
    add("--response-tokens", type=between(1, MOST_TOKENS), help=mean)
    add("--json", action="store_true", help="print JSON")
    return parser


def _cluster(place: str | None) -> tuple[int, int]:
    """Read HOSTSxGPUS: the hosts (0: as many as the run needs) and the GPUs of each."""
    if not place:
        return 0, visible_gpus() or _PER_HOST
    hosts, _, gpus = place.partition("x")
    try:
        return int(between(1, MOST_GPUS, int)(hosts)), int(between(0, MOST_GPUS, int)(gpus))
    except (ValueError, argparse.ArgumentTypeError):
        raise ValueError(f"--place is {place!r}; write hosts x GPUs of each, such as 16x8.") from None


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
    add("--place", nargs="?", const="", metavar="HOSTSxGPUS", help=_PLACE)
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
