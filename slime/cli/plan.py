"""`slime plan`: prints which engine would run on which GPUs with which command line, and starts nothing."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from slime.arguments.topology import Topology, plain_topology, prefill_topology, read_topology
from slime.cli.main import user_errors
from slime.engines.sglang.command import SGLangOptions, server_words
from slime.engines.topology import EnginePlace, place_engines, plan_router, render_plan


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    with user_errors():
        topology = _topology(options)
        if any(model.is_disaggregated for model in topology.models):
            options.rollout_router = "sglang"  # what such a run takes by itself
        per_machine = 0 if options.cpu else options.num_gpus_per_node
        places = place_engines(topology, first_gpu=options.first_gpu, gpus_per_machine=per_machine)
        print(_as_json(topology, places, options) if options.json else _as_text(topology, places, options))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slime plan", description=__doc__.partition(":")[2].strip())
    parser.add_argument("--topology", "--sglang-config", metavar="FILE", help="the file of --sglang-config")
    parser.add_argument("--hf-checkpoint", metavar="MODEL", help="model of entries without a model_path")
    parser.add_argument(
        "--rollout-num-gpus", type=int, help="GPUs of all engines; with --topology: what the file must add up to"
    )
    parser.add_argument("--rollout-num-gpus-per-engine", type=int, default=1, help="where the file does not say [1]")
    parser.add_argument("--prefill-num-servers", type=int, help="as in `slime train`, instead of a file")
    parser.add_argument("--num-gpus-per-node", type=int, default=8, help="GPUs of one machine [8]")
    parser.add_argument("--first-gpu", type=int, default=0, help="GPUs before the engines', which train [0]")
    parser.add_argument("--rollout-router", choices=("builtin", "sglang"), default="builtin", help="[builtin]")
    parser.add_argument("--cpu", action="store_true", help="plan for a machine without GPUs")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _topology(options: argparse.Namespace) -> Topology:
    if options.topology:
        if options.prefill_num_servers:
            raise ValueError("--topology and --prefill-num-servers both say which engines serve; keep one of them.")
        topology = read_topology(options.topology, options.hf_checkpoint, options.rollout_num_gpus_per_engine)
        if options.rollout_num_gpus not in (None, topology.num_gpus):
            raise ValueError(
                f"--rollout-num-gpus is {options.rollout_num_gpus}, but the groups of {options.topology} have "
                f"{topology.num_gpus} GPUs together; use that, or leave it out."
            )
        return topology
    if options.rollout_num_gpus is None or options.hf_checkpoint is None:
        raise ValueError("give --topology FILE, or --hf-checkpoint and --rollout-num-gpus.")
    size = (options.hf_checkpoint, options.rollout_num_gpus, options.rollout_num_gpus_per_engine)
    return (
        prefill_topology(*size, options.prefill_num_servers) if options.prefill_num_servers else plain_topology(*size)
    )


def _server_words(topology: Topology, place: EnginePlace, cpu: bool) -> list[str]:
    model = next(model for model in topology.models if model.name == place.model)
    dtype = "float32" if cpu else "bfloat16"
    chosen = SGLangOptions("python", model.model_path, cpu, dtype, place.num_gpus, 1234, False, extra=place.words)
    return server_words(chosen)


def _as_text(topology: Topology, places: tuple[EnginePlace, ...], options: argparse.Namespace) -> str:
    return render_plan(
        topology,
        places,
        options.rollout_router,
        lambda place: ["python", "-m", "sglang.launch_server", *_server_words(topology, place, options.cpu)],
    )


def _as_json(topology: Topology, places: tuple[EnginePlace, ...], options: argparse.Namespace) -> str:
    engines = [{**asdict(place), "command": _server_words(topology, place, options.cpu)} for place in places]
    routers = [asdict(plan_router(model, options.rollout_router)) for model in topology.models]
    return json.dumps({"num_gpus": topology.num_gpus, "engines": engines, "routers": routers}, indent=2)
