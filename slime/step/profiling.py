"""Profiles the steps of a trainer rank: torch's profiler for some of them, and the memory history."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slime.arguments import Flags
from slime.utils.machine import accelerator
from slime.utils.machine.accelerator import gpu

logger = logging.getLogger(__name__)

OVERALL, ACTOR, LOG_PROBS = "train_overall", "train_actor", "train_log_probs"


class StepProfiler:
    """Records the parts of --profile-target in the rollouts from --profile-step-start to before -end.

    Rollouts count from the start of the process. A nested part becomes a range of the recorded part.
    """

    def __init__(self, args: Flags, rank: int):
        self._args, self._rank = args, rank
        self._num_done = 0
        self._rollout_id = 0
        self._recording = False
        self._on = args.use_pytorch_profiler
        self._memory = MemoryHistory(args, rank) if args.record_memory_history else None

    @contextlib.contextmanager
    def rollout(self, rollout_id: int) -> Iterator[None]:
        """Record the training on one rollout."""
        self._rollout_id = rollout_id
        with self.part(OVERALL):
            yield
        self._num_done += 1
        if self._num_done == self._args.memory_snapshot_num_steps:
            self.close()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        args = self._args
        due = self._on and args.profile_step_start <= self._num_done < args.profile_step_end
        if not due or self._recording or name not in args.profile_target:
            with torch.profiler.record_function(name):
                yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if accelerator.device_count():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._recording = True
        try:
            with torch.profiler.profile(
                activities=activities,
                record_shapes=True,
                profile_memory=True,
                with_stack=True,
                with_flops=True,
            ) as profile:
                yield
        finally:
            self._recording = False
        file = Path(args.run_dir) / "profile" / f"{name}_rollout{self._rollout_id}_rank{self._rank}.json.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(file))
        logger.info("--use-pytorch-profiler: %s", file)

    def close(self) -> None:
        """End the memory history, unless it has ended already."""
        if self._memory is not None:
            self._memory.finish(f"rollout{self._rollout_id}")
            self._memory = None


class MemoryHistory:
    """Records every allocation of the process: torch's on its GPU, or the host's memory with memray."""

    def __init__(self, args: Flags, rank: int):
        folder = Path(args.memory_snapshot_dir or Path(args.run_dir) / "memory").expanduser()
        self._folder = folder
        self._rank = rank
        self._tracker: Any = None  # memray's tracker
        if args.memory_recorder == "memray":
            memray = importlib.import_module("memray")  # optional; asked for when settings are parsed
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"rank{rank}_memray.bin"
            file.unlink(missing_ok=True)
            self._tracker = memray.Tracker(str(file), native_traces=True)
            self._tracker.__enter__()
        elif gpu.is_available():
            gpu.memory._record_memory_history(max_entries=1_000_000, stacks="python")
            observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009 - has no stub
            observe(lambda *_: self._dump("oom"))
        else:
            logger.warning(
                "--record-memory-history: rank %d has no GPU; --memory-recorder memray sees a CPU", rank
            )

    def finish(self, when: str) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(None, None, None)
        elif gpu.is_available():
            self._dump(when)
            gpu.memory._record_memory_history(enabled=None)

    def _dump(self, when: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"rank{self._rank}_{when}_snapshot.pickle"
        gpu.memory._dump_snapshot(str(file))
        logger.info("--record-memory-history: %s", file)
