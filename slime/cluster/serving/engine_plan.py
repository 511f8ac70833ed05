"""How each engine of a run is started: command line, environment and log, from the arguments."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slime.arguments import Args
from slime.arguments.groups.topology import ServedModel
from slime.cluster.run import Run
from slime.engines.server import Command, LaunchPlan, embedded_command
from slime.engines.sglang.command import SGLangOptions, sglang_command
from slime.engines.sglang.router import router_command
from slime.engines.topology import EnginePlace, place_engines
from slime.runtime.placement import Slot
from slime.utils.processes import import_environment, thread_environment
from slime.weight_sync.fp8 import SERVED_BLOCK, served_config

# What all-linear of --lora-target-modules comes to in the dense families; an
# engine must know it before it sees adapters.
_LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def plan_engines(args: Args, run: Run, slots: tuple[Slot, ...]) -> list[LaunchPlan]:
    """One plan per slot, in the order of the topology."""
    command_of = {"embedded": _embedded, "sglang": _sglang}[args.rollout_engine]
    threads = args.engine_threads or _default_threads(args, slots)
    # SGLang has a Python of its own, whose modules are not ours.
    imports = import_environment() if args.rollout_engine == "embedded" else {}
    models = {model.name: model for model in args.engine_topology.models}
    return [
        LaunchPlan(
            name=place.name,
            command=command_of(args, run, EngineSite(models[place.model], place, slot), threads),
            env={**thread_environment(threads), **imports, **slot.env},
            log_path=run.run_dir / "logs" / f"{place.name}.log",
            start_timeout_s=args.engine_start_timeout_s,
            worker_type=place.worker_type,
            host=slot.host,
            beside_trainer=slot.host == run.host,
            token=run.engine_token.at(slot.host),
        )
        for place, slot in zip(place_engines(args.engine_topology), slots, strict=True)
    ]


def plan_router_process(args: Args, run: Run, name: str, words: Sequence[str]) -> LaunchPlan:
    """SGLang's router before engines of one model; `words`: more of its own flags."""
    timeout = ("--request-timeout-secs", str(args.sglang_router_request_timeout_secs))
    return LaunchPlan(
        name=name,
        command=router_command(args.router_python, "cache_aware", (*timeout, *words)),
        env={},
        log_path=run.run_dir / "logs" / f"{name}.log",
        start_timeout_s=args.engine_start_timeout_s,
    )


@dataclass(frozen=True, slots=True)
class EngineSite:
    """One engine: the model it serves, its share of the topology, its devices."""

    model: ServedModel
    place: EnginePlace
    slot: Slot


def _default_threads(args: Args, slots: Sequence[Slot]) -> int:
    """A share of a machine's cores. SGLang runs three processes, whose threads
    get in each other's way on a CPU machine.
    """
    crowd = max(Counter(slot.machine for slot in slots).values(), default=1)
    return 1 if args.rollout_engine == "sglang" else max(1, (os.cpu_count() or 1) // crowd)


def _embedded(args: Args, run: Run, site: EngineSite, threads: int) -> Command:
    return embedded_command(
        model_path=site.model.model_path,
        device=args.embedded_device,
        dtype=args.embedded_dtype if args.embedded_dtype != "auto" else args.dtype,
        threads=threads,
        max_running_requests=args.embedded_max_running_requests,
        max_total_tokens=args.embedded_max_total_tokens,
        seed=args.seed,
        shm_prefix=run.shm_prefix,
        await_weights=site.model.update_weights and not args.debug_rollout_only,
        fp8_block=SERVED_BLOCK if _serves_fp8(args, site.model) else None,
        host=site.slot.host,
    )


def _sglang(args: Args, run: Run, site: EngineSite, threads: int) -> Command:
    cpu = not site.slot.gpu_ids
    return sglang_command(
        SGLangOptions(
            python=args.sglang_python,
            model_path=site.model.model_path,
            cpu=cpu,
            # That of the trainer, so that both have the same distribution.
            dtype=args.dtype if args.dtype != "auto" else "float32" if cpu else "bfloat16",
            tensor_parallel=site.place.num_gpus,
            seed=args.seed,
            # A model that gets no push could not be filled again.
            memory_saver=bool(args.offload_rollout) and site.model.update_weights and not cpu,
            host=site.slot.host,
            extra=(
                *_replay_words(args, site.model),
                *_fp8_words(args, site.model),
                *_adapter_words(args, site.model, cpu),
                *args.sglang_options,
                *site.place.words,
            ),
        )
    )


def _replay_words(args: Args, model: ServedModel) -> tuple[str, ...]:
    return (
        ("--enable-return-routed-experts",)
        if args.use_rollout_routing_replay and model.update_weights
        else ()
    )


def _serves_fp8(args: Args, model: ServedModel) -> bool:
    return args.rollout_quantization == "fp8" and model.update_weights


def _fp8_words(args: Args, model: ServedModel) -> tuple[str, ...]:
    """What makes SGLang an engine of FP8 weights without a checkpoint of them:
    the first push brings all of its weights.
    """
    if not _serves_fp8(args, model):
        return ()
    config = json.dumps({"quantization_config": served_config(model.model_path)})
    return ("--load-format", "dummy", "--json-model-override-args", config)


def _adapter_words(args: Args, model: ServedModel, cpu: bool) -> tuple[str, ...]:
    """What makes SGLang ready for adapters that come alone: it sizes their memory before it knows them."""
    if args.lora_sync != "adapter" or not model.update_weights:
        return ()
    targets = args.lora_target_modules
    names = _LINEAR_LAYERS if targets == ["all-linear"] else targets
    # One adapter, and requests without any: a health probe is one.
    words = ("--enable-lora", "--max-lora-rank", str(args.lora_rank), "--max-loras-per-batch", "2")
    return (*words, "--lora-target-modules", *names, *(("--lora-backend", "torch_native") if cpu else ()))
