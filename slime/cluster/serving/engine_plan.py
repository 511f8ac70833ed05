"""How each engine of a run is started: command line, environment and log, from the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime.arguments import Args
from slime.catalog.engines import ENGINES, EngineKind
from slime.engines.engine_process import Command, LaunchPlan
from slime.engines.launch_plan import EnginePlace, EngineSite, place_engines
from slime.engines.sglang.router import router_command
from slime.runtime.placement import Slot, cores_each
from slime.utils.files.safetensors_files import all_files
from slime.utils.machine.processes import import_environment, thread_environment
from slime.utils.machine.run_identity import Run
from slime.utils.misc import load_function
from slime.weight_sync.fp8 import served_config

_TINY_BYTES = 4 << 20  # of all weights


def plan_engines(args: Args, run: Run, slots: tuple[Slot, ...]) -> list[LaunchPlan]:
    """One plan per slot, in the order of the topology."""
    kind = ENGINES[args.rollout_engine]
    share = _share_of_cores(kind, slots)
    # An engine with a Python of its own has its own modules, too.
    imports = import_environment() if kind.find_python is None else {}
    models = {model.name: model for model in args.engine_topology.models}

    def site_of(place: EnginePlace, slot: Slot) -> EngineSite:
        path, pushed = models[place.model].model_path, models[place.model].update_weights
        if path is None:
            raise ValueError("--hf-checkpoint is required: engines serve its model.")
        quantization = served_config(path) if args.rollout_quantization == "fp8" and pushed else None
        threads = args.engine_threads or (1 if _is_tiny(Path(path)) else share)
        return EngineSite(path, pushed, place, slot.gpu_ids, slot.host, run.shm_prefix, threads, quantization)

    def command(site: EngineSite) -> Command:
        words: Command = load_function(kind.command)(args, site)
        return words

    def environment(site: EngineSite) -> dict[str, str]:
        return dict(load_function(kind.environment)(args, site)) if kind.environment is not None else {}

    placed = list(zip(place_engines(args.engine_topology), slots, strict=True))

    return [
        LaunchPlan(
            name=place.name,
            command=command(site_of(place, slot)),
            env={
                **thread_environment(site_of(place, slot).threads),
                **imports,
                **environment(site_of(place, slot)),
                **slot.env,
            },
            log_path=run.run_dir / "logs" / f"{place.name}.log",
            start_timeout_s=args.engine_start_timeout_s,
            worker_type=place.worker_type,
            host=slot.host,
            beside_trainer=slot.host == run.host,
            token=run.engine_token.at(slot.host),
        )
        for place, slot in placed
    ]


def plan_router_process(args: Args, run: Run, name: str, words: Sequence[str]) -> LaunchPlan:
    """SGLang's router before engines of one model; `words`: more of its own flags."""
    assert args.router_python is not None, "the rules of the arguments find the router's interpreter"
    timeout = ("--request-timeout-secs", str(args.sglang_router_request_timeout_secs))
    return LaunchPlan(
        name=name,
        command=router_command(args.router_python, "cache_aware", (*timeout, *words)),
        env={},
        log_path=run.run_dir / "logs" / f"{name}.log",
        start_timeout_s=args.engine_start_timeout_s,
    )


def _share_of_cores(kind: EngineKind, slots: Sequence[Slot]) -> int:
    """For each engine of a machine; one where the threads of an engine's processes would compete."""
    return 1 if kind.several_processes else cores_each(slots)


def _is_tiny(model: Path) -> bool:
    """Whether a second thread would save nothing: to share out such small products costs what it saves."""
    return model.is_dir() and 0 < sum(file.stat().st_size for file in all_files(model)) <= _TINY_BYTES
