"""How each engine of a run is started: command line, environment and log, from the arguments."""

from __future__ import annotations

import os

from slime.arguments import Args
from slime.cluster.placement import Slot
from slime.cluster.run import Run
from slime.engines.server import Command, LaunchPlan, embedded_command
from slime.engines.sglang.command import SGLangOptions, sglang_command
from slime.utils.processes import thread_environment


def plan_engines(args: Args, run: Run, slots: tuple[Slot, ...]) -> list[LaunchPlan]:
    """One plan per slot."""
    command_of = {"embedded": _embedded, "sglang": _sglang}[args.rollout_engine]
    threads = args.engine_threads or _default_threads(args, len(slots))
    return [
        LaunchPlan(
            name=f"engine-{slot.index}",
            command=command_of(args, run, slot, threads),
            env={**thread_environment(threads), **slot.env},
            log_path=run.run_dir / "logs" / f"engine-{slot.index}.log",
            start_timeout_s=args.engine_start_timeout_s,
        )
        for slot in slots
    ]


def _default_threads(args: Args, num_engines: int) -> int:
    """A share of the cores. SGLang runs three processes, whose threads get in each other's way on a CPU machine."""
    return 1 if args.rollout_engine == "sglang" else max(1, (os.cpu_count() or 1) // max(1, num_engines))


def _embedded(args: Args, run: Run, slot: Slot, threads: int) -> Command:
    return embedded_command(
        model_path=args.hf_checkpoint,
        device=args.embedded_device,
        dtype=args.embedded_dtype if args.embedded_dtype != "auto" else args.dtype,
        threads=threads,
        max_running_requests=args.embedded_max_running_requests,
        max_total_tokens=args.embedded_max_total_tokens,
        seed=args.seed,
        shm_prefix=run.shm_prefix,
        await_weights=not args.debug_rollout_only,
    )


def _sglang(args: Args, run: Run, slot: Slot, threads: int) -> Command:
    cpu = not slot.gpu_ids
    return sglang_command(
        SGLangOptions(
            python=args.sglang_python,
            model_path=args.hf_checkpoint,
            cpu=cpu,
            # That of the trainer, so that both have the same distribution.
            dtype=args.dtype if args.dtype != "auto" else "float32" if cpu else "bfloat16",
            tensor_parallel=args.rollout_num_gpus_per_engine,
            seed=args.seed,
            memory_saver=bool(args.offload_rollout) and not cpu,
            extra=args.sglang_options,
        )
    )
