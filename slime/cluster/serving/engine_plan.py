"""How each engine of a run is started: command line, environment and log, from the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime.arguments import Args
from slime.arguments.passthrough.router_flags import need_router_python
from slime.catalog.deadlines import timeout_s
from slime.catalog.engines import ENGINES
from slime.engines.engine_process import LaunchPlan
from slime.engines.launch_plan import EnginePlace, EngineSite, place_engines
from slime.engines.sglang.router import router_command
from slime.runtime.placement import Slot, cores_each
from slime.utils.machine.children import import_environment, thread_environment
from slime.utils.machine.run_identity import Run
from slime.weight_sync.fp8 import served_config


def plan_engines(args: Args, run: Run, slots: tuple[Slot, ...]) -> list[LaunchPlan]:
    """One plan per slot, in the order of the topology."""
    kind = ENGINES[args.rollout_engine]
    cores = cores_each(slots)
    # An engine with a Python of its own has its own modules, too.
    imports = {} if kind.own_python else import_environment()
    models = {model.name: model for model in args.engine_topology.models}

    def site_of(place: EnginePlace, slot: Slot) -> EngineSite:
        path, pushed = models[place.model].model_path, models[place.model].update_weights
        if path is None:
            raise ValueError("--hf-checkpoint is required: engines serve its model.")
        quantization = served_config(path) if args.rollout_quantization == "fp8" and pushed else None
        threads = args.engine_threads or kind.command.num_threads(Path(path), cores)
        return EngineSite(path, pushed, place, slot.gpu_ids, slot.host, run.shm_prefix, threads, quantization)

    def plan(place: EnginePlace, slot: Slot) -> LaunchPlan:
        site = site_of(place, slot)
        environment = {**thread_environment(site.threads), **imports}
        return LaunchPlan(
            name=place.name,
            command=kind.command.run_command(args, site),
            env={**environment, **kind.command.run_environment(args, site), **slot.env},
            log_path=run.run_dir / "logs" / f"{place.name}.log",
            start_timeout_s=timeout_s(args, "engine-start"),
            worker_type=place.worker_type,
            host=slot.host,
            beside_trainer=slot.host == run.host,
            token=run.engine_token.at(slot.host),
        )

    return [plan(place, slot) for place, slot in zip(place_engines(args.engine_topology), slots, strict=True)]


def plan_router_process(args: Args, run: Run, name: str, words: Sequence[str]) -> LaunchPlan:
    """SGLang's router before engines of one model; `words`: more of its own flags."""
    python = need_router_python("--rollout-router sglang")
    timeout = ("--request-timeout-secs", str(round(timeout_s(args, "router-request"))))
    return LaunchPlan(
        name=name,
        command=router_command(python, "cache_aware", (*timeout, *words)),
        env={},
        log_path=run.run_dir / "logs" / f"{name}.log",
        start_timeout_s=timeout_s(args, "engine-start"),
    )
