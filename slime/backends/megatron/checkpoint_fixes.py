"""What megatron-core 0.16.1 gets wrong about checkpoints: a server of its own outlives a trainer that is
killed, and moments of experts are read only where as many optimizers are chained as when they were written.
"""

import multiprocessing
import os
import threading
import time
from multiprocessing.managers import SyncManager
from typing import Any

import torch

_POLL_S = 2.0
_COMMON = ("optimizer", "param_state_sharding_type")


def own_results_server() -> None:
    """Before a save: the server through which writers report ends with this process, however that ends."""
    # Only where a checkpoint is written.
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(_leave_with, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()


def common_parts(state: dict[Any, Any], optimizer: Any) -> list[dict[str, Any]]:
    """Of each chained optimizer in a sharded state: what is not cut over ranks
    (parameter groups, the kind of sharding).
    """
    return [
        {name: value for name, value in part.items() if name in _COMMON}
        for part in _members(state, optimizer)
    ]


def with_common_parts(loaded: dict[Any, Any], own: list[dict[str, Any]], *, step: int) -> dict[Any, Any]:
    """What was read, in the structure of this layout: with expert
    parallelism experts have an optimizer of their own.

    Moments are kept by parameter, so they fit any structure; the rest is that of
    this run, at the step of the checkpoint.
    """
    found = []
    for part, common in zip(_parts(loaded, len(own)), own, strict=True):
        groups = [{**group, "step": step} for group in common["optimizer"]["param_groups"]]
        kept = {name: value for name, value in part.items() if isinstance(name, str)}
        found.append({**kept, **common, "optimizer": {**common["optimizer"], "param_groups": groups}})
    return found[0] if len(found) == 1 else dict(enumerate(found))


def with_own_groups(loaded: dict[Any, Any], optimizer: Any, *, step: int) -> dict[Any, Any]:
    """The same for optimizers that are not distributed: moments as they
    were read, parameter groups of this run.
    """
    found = []
    members = optimizer.chained_optimizers
    for part, member in zip(_parts(loaded, len(members)), members, strict=True):
        # With 16-bit weights Adam's state lies beside the fp32 ones.
        inner = part.get("optimizer", part)
        state = {
            index: {**moments, "step": torch.tensor(float(step))}
            for index, moments in inner["state"].items()
            if index != "common_step"
        }
        groups = member.optimizer.state_dict()["param_groups"]
        adam = {"state": state, "param_groups": groups}
        fp32 = {name: part[name] for name in ("fp32_from_fp16_params",) if name in part}
        found.append({"optimizer": adam, **fp32} if fp32 else adam)
    return found[0] if len(found) == 1 else dict(enumerate(found))


def _members(state: dict[Any, Any], optimizer: Any) -> list[dict[str, Any]]:
    return _parts(state, len(optimizer.chained_optimizers))


def _parts(state: dict[Any, Any], count: int) -> list[dict[str, Any]]:
    """One chained optimizer has the state to itself; several have one each, under their index."""
    return [state] if count == 1 else [state[index] for index in range(count)]


def _leave_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
