"""Flags and rules of the profiling of trainer ranks: profiles of steps, history of memory."""

import importlib.util
from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, needs

# -- when flags have an effect
PROFILED = needs("use_pytorch_profiler", harmless=True)
REMEMBERED = needs("record_memory_history", harmless=True)


@dataclass
class ProfilingFlags:
    """Profiles of the trainer."""

    use_pytorch_profiler: bool = flag(
        False, "torch's profile of some rollouts' training: traces in RUN/profile, for Perfetto or Chrome"
    )
    profile_step_start: int = flag(
        10, "first rollout that is profiled, counted from the start of the process", ge=0, only_with=PROFILED
    )
    profile_step_end: int = flag(12, "first rollout that is no longer profiled", ge=1, only_with=PROFILED)
    profile_target: list[str] = flag(
        ["train_overall"],
        "what a trace covers: all of the training, its steps, or the passes before them",
        choices=("train_overall", "train_actor", "train_log_probs"),
        only_with=PROFILED,
    )
    record_memory_history: bool = flag(
        False, "what trainer ranks allocate and where, written at the end and when memory runs out"
    )
    memory_recorder: str = flag(
        "torch",
        "torch: GPU memory, for pytorch.org/memory_viz; memray: host memory, for `memray flamegraph`",
        choices=("torch", "memray"),
        only_with=REMEMBERED,
    )
    memory_snapshot_dir: str | None = flag(
        None, "folder of these files; default: RUN/memory", only_with=REMEMBERED
    )
    memory_snapshot_num_steps: int | None = flag(
        None, "number of rollouts to record; default: all", ge=1, only_with=REMEMBERED
    )


def profiling(draft: Draft) -> None:
    start, end = draft.profile_step_start, draft.profile_step_end
    if draft.use_pytorch_profiler and end <= start:
        raise ValueError(f"--profile-step-end is {end}, not above --profile-step-start {start}.")
    records = draft.record_memory_history
    if records and draft.memory_recorder == "memray" and importlib.util.find_spec("memray") is None:
        raise ValueError("--memory-recorder memray needs the package memray: pip install 'slime-rl[memray]'.")
