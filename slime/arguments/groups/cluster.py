"""Flags and rules of machines: how many ranks train and engines generate, and who shares a device."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from slime.arguments.core.devices import visible_gpus
from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, lacks, option_of
from slime.arguments.groups.precision import derive_precision
from slime.catalog.backends import BACKENDS
from slime.utils.machine.devices import COLLECTIVES, DEVICES


@dataclass
class ClusterFlags:
    """Cluster (on a machine without GPUs, "gpus" means ranks)."""

    actor_num_nodes: int = flag(1, "machines that train", ge=1)
    actor_num_gpus_per_node: int | None = flag(
        None, "GPUs that train on each machine; default: all visible", ge=0
    )
    rollout_num_gpus: int | None = flag(
        None, "GPUs that generate, all machines together; default: the rest", ge=0
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs of one engine", ge=1)
    num_gpus_per_node: int | None = flag(None, "GPUs of one machine; default: those visible", ge=1)
    colocate: bool = flag(
        False, "trainer and engines share GPUs, in turns", only_with=lacks("rollout_external_engine_addrs")
    )
    offload_train: bool | None = flag(None, "move the trainer off the device while engines generate")
    offload_rollout: bool | None = flag(None, "release engine memory while the trainer works")
    release_train: bool = flag(False, "end the trainer's processes while engines generate; needs --save")
    distributed_backend: str | None = flag(
        None, "torch.distributed backend; default: nccl on GPUs, gloo on CPU", choices=COLLECTIVES
    )
    max_restarts: int = flag(
        3, "most restarts without a new step between them, of a trainer that lost a rank or hangs", ge=0
    )
    elastic: bool = flag(
        False,
        "after the loss of a machine, continue with the remaining ranks if they can hold the model",
    )
    peer_copies: int = flag(
        0,
        "rollouts between copies of the trainer's state in shared memory, from which a lost rank "
        "restarts. 0: none",
        ge=0,
    )
    train_env_vars: dict | None = flag(None, "environment variables of the trainer's processes, as JSON")
    trainer_threads: int | None = flag(
        None, "CPU threads of each trainer rank; default: a share of them", ge=1
    )
    engine_threads: int | None = flag(None, "CPU threads of each engine; default: a share of the cores", ge=1)


def release_train(draft: Draft) -> None:
    """Require that a checkpoint of every rollout and the weights are on disk when the processes end."""
    if not draft.release_train:
        return
    if draft.debug_train_only or draft.debug_rollout_only:
        _switch_off(draft, "release_train", "only one side runs in this debug mode", False)
        return
    for holds, why in (
        (draft.save is not None, "restarts the trainer from checkpoints; add --save DIR"),
        (not draft.no_save_optim, "needs the optimizer in checkpoints; remove --no-save-optim"),
        (draft.update_weight_mode == "full", "needs whole weights on disk; use --update-weight-mode full"),
        (
            draft.update_weight_transport in ("auto", "disk"),
            "leaves no sender of weights for engines that start late; use --update-weight-transport disk",
        ),
        (draft.update_weights_interval == 1, "pushes after every rollout; remove --update-weights-interval"),
    ):
        if not holds:
            raise ValueError(f"--release-train {why}.")
    draft.derive("update_weight_transport", "disk", "release_train")
    if draft.update_weight_disk_dir is None:
        draft.derive("update_weight_disk_dir", f"{draft.save.rstrip('/')}/weights", "release_train: in save")
    if draft.async_save:
        _switch_off(draft, "async_save", "--release-train waits for each checkpoint", False)
    draft.derive("offload_train", False, "release_train: its processes end")


def _switch_off(draft: Draft, name: str, why: str, value: object) -> None:
    draft.idle.append(f"{option_of(name)} is set, but {why}.")
    draft.derive(name, value, why)


def peer_copies(draft: Draft) -> None:
    """Check --peer-copies: each copy is a whole checkpoint, in memory that every rank can read."""
    if not draft.peer_copies:
        return
    reasons = {
        "a lost trainer is never restarted (--max-restarts 0)": not draft.max_restarts,
        "nothing is trained": draft.debug_rollout_only,
        "--release-train has a checkpoint of every rollout": draft.release_train,
    }
    if why := next((why for why, holds in reasons.items() if holds), None):
        _switch_off(draft, "peer_copies", why, 0)
        return
    if draft.no_save_optim:
        raise ValueError("--peer-copies needs the optimizer in what is saved; remove --no-save-optim.")
    if draft.actor_num_nodes > 1 and not BACKENDS[draft.train_backend].folder_per_machine:
        raise ValueError(
            f"--peer-copies with --train-backend {draft.train_backend} and --actor-num-nodes "
            f"{draft.actor_num_nodes}: its checkpoints need one folder that all ranks see; use a small "
            "--save-interval instead, or --train-backend fsdp."
        )
    if draft.async_save:
        _switch_off(draft, "async_save", "--peer-copies waits for each checkpoint", False)


def devices(draft: Draft) -> None:
    derive_sizes(draft, visible_gpus)
    derive_offload(draft)
    derive_precision(draft, visible_gpus)


def derive_sizes(draft: Draft, count_gpus: Callable[[], int]) -> None:
    """Derive sizes from the visible GPUs; without any, "gpus" means ranks, and one is the default."""
    sizes = (draft.actor_num_gpus_per_node, draft.num_gpus_per_node, draft.distributed_backend)
    needs_count = None in sizes or (draft.rollout_num_gpus is None and not draft.colocate)
    gpus = count_gpus() if needs_count else 0  # counting them loads torch
    if draft.distributed_backend is None:
        backend = DEVICES["cuda" if gpus else "cpu"].collectives
        draft.derive("distributed_backend", backend, "nccl on GPUs, gloo on CPU")
    if draft.num_gpus_per_node is None:
        known = (
            draft.engine_topology.largest_engine if draft.sglang_config else draft.rollout_num_gpus_per_engine
        )
        size = max(gpus, draft.actor_num_gpus_per_node or 0, 1 if gpus else max(_replica(draft), known))
        draft.derive("num_gpus_per_node", size, "GPUs visible on this machine")
    if gpus:
        _share_gpus(draft, gpus)
    else:
        _one_rank_each(draft)
    _check_sizes(draft)


def _one_rank_each(draft: Draft) -> None:
    if draft.actor_num_gpus_per_node is None:
        draft.derive("actor_num_gpus_per_node", _replica(draft), "no GPU visible: the ranks of one replica")
    if draft.rollout_num_gpus is None and draft.colocate:
        draft.derive("rollout_num_gpus", _actor_total(draft), "colocate: as many as train")
    elif draft.rollout_num_gpus is None:
        draft.derive("rollout_num_gpus", draft.rollout_num_gpus_per_engine, "no GPU visible: one engine")


def _replica(draft: Draft) -> int:
    """Return the number of ranks that hold one copy of the model together."""
    return draft.tensor_model_parallel_size * draft.context_parallel_size * draft.pipeline_model_parallel_size


def _share_gpus(draft: Draft, gpus: int) -> None:
    """Separate trainer and engines only if the sizes ask for it; otherwise they take turns on all GPUs."""
    alone = draft.debug_train_only or draft.debug_rollout_only
    if draft.actor_num_gpus_per_node is None:
        separate = draft.rollout_num_gpus if not draft.colocate and not alone else None
        left = gpus - (separate or 0)
        draft.derive("actor_num_gpus_per_node", left if left > 0 else gpus, f"{gpus} visible GPUs")
    total = _actor_total(draft)
    external = bool(draft.rollout_external_engine_addrs)
    if not draft.colocate and not alone and not external and not draft.was_given("colocate"):
        wanted = draft.rollout_num_gpus or 0
        fits = draft.actor_num_nodes > 1 or draft.actor_num_gpus_per_node + max(wanted, 1) <= gpus
        if not fits or (draft.rollout_num_gpus is None and not draft.was_given("actor_num_gpus_per_node")):
            draft.derive("colocate", True, f"{gpus} visible GPUs: trainer and engines share them")
    if draft.rollout_num_gpus is None:
        if draft.colocate or alone or draft.actor_num_nodes > 1:
            draft.derive("rollout_num_gpus", total, "as many as train")
        else:
            draft.derive("rollout_num_gpus", max(gpus - total, 1), "visible GPUs that do not train")


def _actor_total(draft: Draft) -> int:
    return draft.actor_num_nodes * draft.actor_num_gpus_per_node


def _check_sizes(draft: Draft) -> None:
    total, each = draft.rollout_num_gpus, draft.rollout_num_gpus_per_engine
    if total % each:
        raise ValueError(
            f"--rollout-num-gpus is {total}, not a multiple of --rollout-num-gpus-per-engine {each}: "
            f"{total % each} would stay idle; use {total - total % each or each}."
        )
    nodes, ranks = draft.actor_num_nodes, draft.actor_num_gpus_per_node
    in_cluster = bool(os.environ.get("RAY_ADDRESS"))  # also in a job of `ray job submit`
    if (nodes > 1 or in_cluster) and not draft.was_given("runtime"):
        why = "actor_num_nodes: several machines" if nodes > 1 else "environment variable RAY_ADDRESS"
        draft.derive("runtime", "ray", why)
    if nodes > 1 and draft.runtime == "local":
        raise ValueError(
            f"--actor-num-nodes is {nodes}, but --runtime local uses this machine only; use --runtime ray."
        )
    if ranks > draft.num_gpus_per_node:
        raise ValueError(
            f"--actor-num-gpus-per-node is {ranks}, but --num-gpus-per-node says that a machine has "
            f"{draft.num_gpus_per_node}; use at most that, or more machines (--actor-num-nodes)."
        )


def derive_offload(draft: Draft) -> None:
    """Offload trainer and engines in turns where they share a device, unless a flag forbids it."""
    alone = draft.debug_train_only or draft.debug_rollout_only
    if alone and draft.colocate:
        draft.derive("colocate", False, "only one side runs in this debug mode")
    for name in ("offload_train", "offload_rollout"):
        if getattr(draft, name) is not None and not (alone and getattr(draft, name)):
            continue
        if alone:
            draft.derive(name, False, "only one side runs in this debug mode")
        elif draft.colocate:
            draft.derive(name, True, "colocate: the two sides take turns")
        else:
            draft.derive(name, False, "trainer and engines do not share devices")
