"""Sizes that were written for another machine: told where they do nothing here, or will take long."""

import os
from collections.abc import Callable

from slime.arguments.core.draft import Draft

CROWDED = 2  # processes per core from which a run is slow enough to say so


def tell_of_this_machine(draft: Draft, count_gpus: Callable[[], int]) -> None:
    """Warnings only: scripts carry these flags from machine to
    machine. Of a cluster nothing is known here.
    """
    if draft.runtime == "ray":
        return
    gpus = count_gpus()
    _tell_of_missing_gpus(draft, gpus)
    if not gpus:
        _tell_of_nothing_to_share(draft)
        _tell_of_cores(draft, num_cores())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tell_of_missing_gpus(draft: Draft, gpus: int) -> None:
    ranks, engines = num_processes(draft)
    if not draft.was_given("num_gpus_per_node") or draft.num_gpus_per_node <= max(gpus, ranks + engines):
        return
    has = f"those {gpus} alone" if gpus else f"{ranks} trainer rank(s) and {engines} engine(s) on its cores"
    draft.warn(
        f"--num-gpus-per-node is {draft.num_gpus_per_node}, but this machine shows {gpus or 'no'} GPU(s): "
        f"the run has {has}."
    )


def _tell_of_nothing_to_share(draft: Draft) -> None:
    sharing = ("colocate", "offload", "offload_train", "offload_rollout")
    given = [
        "--" + name.replace("_", "-") for name in sharing if draft.was_given(name) and getattr(draft, name)
    ]
    if given:
        draft.warn(
            f"{', '.join(given)}: this machine shows no GPU to share; trainer and engines are processes "
            "beside each other on its cores."
        )


def _tell_of_cores(draft: Draft, cores: int) -> None:
    ranks, engines = num_processes(draft)
    if ranks + engines > CROWDED * cores:
        draft.warn(
            f"{ranks} trainer rank(s) and {engines} engine(s) share {cores} core(s): each is a process that "
            "loads torch and its part of the model, so the start takes minutes and a step longer than with "
            "fewer; without GPUs, --actor-num-gpus-per-node and --rollout-num-gpus count processes (here "
            f"{max(1, cores // 2)} each would do)."
        )


def num_processes(draft: Draft) -> tuple[int, int]:
    """Trainer ranks and engines of a run without GPUs."""
    ranks = 0 if draft.debug_rollout_only else draft.actor_num_nodes * draft.actor_num_gpus_per_node
    external = draft.debug_train_only or draft.rollout_external_engine_addrs
    return ranks, 0 if external else draft.rollout_num_gpus // draft.rollout_num_gpus_per_engine
