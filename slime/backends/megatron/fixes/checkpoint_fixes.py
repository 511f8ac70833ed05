"""Fixes two checkpoint bugs of megatron-core 0.16.1.

The server through which writers report outlives a killed trainer, and the moments of experts can be read only
if the same number of optimizers is chained as when they were written.
"""

import multiprocessing
import os
import threading
import time
from multiprocessing.managers import SyncManager
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer

_POLL_S = 2.0
_COMMON = ("optimizer", "param_state_sharding_type")


def own_results_server() -> None:
    """Start a server for the checkpoint writers that ends with this process; called before a save."""
    # Only where a checkpoint is written.
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(_leave_with, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()


def common_parts(state: dict[Any, Any], optimizer: ChainedOptimizer) -> list[dict[str, Any]]:
    """Return the unsharded state of each optimizer of a chain: parameter groups, the kind of sharding."""
    parts = _parts(state, len(optimizer.chained_optimizers))
    return [{name: value for name, value in part.items() if name in _COMMON} for part in parts]


def with_common_parts(loaded: dict[Any, Any], own: list[dict[str, Any]], *, step: int) -> dict[Any, Any]:
    """Return the loaded state in the structure of this layout, where experts may have their own optimizer.

    Moments are kept by parameter and fit any structure; all else is this run's, at the checkpoint's step.
    """
    found = []
    for part, common in zip(_parts(loaded, len(own)), own, strict=True):
        groups = [{**group, "step": step} for group in common["optimizer"]["param_groups"]]
        kept = {name: value for name, value in part.items() if isinstance(name, str)}
        found.append({**kept, **common, "optimizer": {**common["optimizer"], "param_groups": groups}})
    return found[0] if len(found) == 1 else dict(enumerate(found))


def with_own_groups(loaded: dict[Any, Any], optimizer: ChainedOptimizer, *, step: int) -> dict[Any, Any]:
    """`with_common_parts` for optimizers that are not distributed."""
    found = []
    members = optimizer.chained_optimizers
    for part, member in zip(_parts(loaded, len(members)), members, strict=True):
        # With 16-bit weights Adam's state is kept with the fp32 weights.
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


def _parts(state: dict[Any, Any], count: int) -> list[dict[str, Any]]:
    """Return the state of each chained optimizer; a single one has the whole state."""
    return [state] if count == 1 else [state[index] for index in range(count)]


def _leave_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
