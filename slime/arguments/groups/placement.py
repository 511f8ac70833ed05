"""Sizes that follow from the machine: how many ranks train, how many engines
generate, who shares a device with whom.
"""

from collections.abc import Callable

from slime.arguments.core.draft import Draft


def derive_sizes(draft: Draft, count_gpus: Callable[[], int]) -> None:
    """Sizes left open come from what is visible. On a machine without GPUs,
    "gpus" means ranks, and one is the default.
    """
    needs_count = draft.actor_num_gpus_per_node is None or draft.num_gpus_per_node is None
    needs_count |= draft.rollout_num_gpus is None and not draft.colocate
    needs_count |= draft.distributed_backend is None
    gpus = count_gpus() if needs_count else 0
    if draft.distributed_backend is None:
        draft.derive("distributed_backend", "nccl" if gpus else "gloo", "nccl on GPUs, gloo on CPU")
    if draft.num_gpus_per_node is None:
        size = max(gpus, draft.actor_num_gpus_per_node or 0, 1 if gpus else _replica(draft))
        draft.derive("num_gpus_per_node", size, "GPUs visible on this machine")
    if gpus:
        _share_gpus(draft, gpus)
    else:
        _one_rank_each(draft)
    _check_engine_size(draft)
    _check_node_size(draft)


def _one_rank_each(draft: Draft) -> None:
    if draft.actor_num_gpus_per_node is None:
        replica = _replica(draft)
        why = "no GPU visible: one rank" if replica == 1 else "no GPU visible: the ranks of one replica"
        draft.derive("actor_num_gpus_per_node", replica, why)
    if draft.rollout_num_gpus is None:
        if draft.colocate:
            draft.derive("rollout_num_gpus", _actor_total(draft), "colocate: as many as train")
        else:
            draft.derive("rollout_num_gpus", draft.rollout_num_gpus_per_engine, "no GPU visible: one engine")


def _replica(draft: Draft) -> int:
    """Ranks that hold one copy of the model together."""
    return draft.tensor_model_parallel_size * draft.context_parallel_size * draft.pipeline_model_parallel_size


def _share_gpus(draft: Draft, gpus: int) -> None:
    """Separate pools only where the sizes say so; otherwise trainer and engines take turns on all of them."""
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


def _check_engine_size(draft: Draft) -> None:
    total, each = draft.rollout_num_gpus, draft.rollout_num_gpus_per_engine
    if total % each:
        raise ValueError(
            f"--rollout-num-gpus is {total}, not a multiple of --rollout-num-gpus-per-engine {each}: "
            f"{total % each} would stay idle; use {total - total % each or each}."
        )


def _check_node_size(draft: Draft) -> None:
    if draft.actor_num_nodes > 1 and draft.runtime == "local":
        raise ValueError(
            f"--actor-num-nodes is {draft.actor_num_nodes}, but --runtime local has this machine alone; use "
            "--runtime ray on a cluster of that many, or --actor-num-nodes 1."
        )
    if draft.actor_num_gpus_per_node > draft.num_gpus_per_node:
        raise ValueError(
            f"--actor-num-gpus-per-node is {draft.actor_num_gpus_per_node}, but --num-gpus-per-node says "
            "that a machine has "
            f"{draft.num_gpus_per_node}; use at most that, or more machines (--actor-num-nodes)."
        )


def derive_offload(draft: Draft) -> None:
    """Who shares a device leaves it while the other works, unless told otherwise."""
    alone = draft.debug_train_only or draft.debug_rollout_only
    if alone and draft.colocate:
        draft.derive("colocate", False, "only one side runs in this debug mode")
    for name in ("offload_train", "offload_rollout"):
        if getattr(draft, name) is not None and not (alone and getattr(draft, name)):
            continue
        if alone:
            draft.derive(name, False, "only one side runs in this debug mode")
        elif draft.offload:
            draft.derive(name, True, "offload")
        elif draft.colocate:
            draft.derive(name, True, "colocate: the two sides take turns")
        else:
            draft.derive(name, False, "trainer and engines do not share devices")
