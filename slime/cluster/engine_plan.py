"""How each engine of a run is started: command line, environment and log, from the arguments."""

from __future__ import annotations

import os

from slime.arguments import Args
from slime.cluster.placement import Slot
from slime.cluster.run import Run
from slime.engines.server import LaunchPlan, embedded_command
from slime.utils.processes import thread_environment


def plan_engines(args: Args, run: Run, slots: tuple[Slot, ...]) -> list[LaunchPlan]:
    """One plan per slot."""
    threads = args.engine_threads or max(1, (os.cpu_count() or 1) // max(1, len(slots)))
    return [
        LaunchPlan(
            name=f"engine-{slot.index}",
            command=embedded_command(
                model_path=args.hf_checkpoint,
                device=args.embedded_device,
                dtype=args.embedded_dtype if args.embedded_dtype != "auto" else args.dtype,
                threads=threads,
                max_running_requests=args.embedded_max_running_requests,
                max_total_tokens=args.embedded_max_total_tokens,
                seed=args.seed,
                shm_prefix=run.shm_prefix,
                await_weights=not args.debug_rollout_only,
            ),
            env={**thread_environment(threads), **slot.env},
            log_path=run.run_dir / "logs" / f"engine-{slot.index}.log",
            start_timeout_s=args.engine_start_timeout_s,
        )
        for slot in slots
    ]
