"""Fixes how megatron-core 0.16.1 saves and loads torch's Adam, the optimizer that slime uses."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from slime.backends.megatron.optimizer import members
from slime.backends.shared.placed_adam import PlacedAdamW, create_state, step_on_its_device

_installed = False


def _torch_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    for member in members(optimizer):
        if isinstance(member.optimizer, torch.optim.Optimizer):
            yield member.optimizer


@contextmanager
def plain_moments(optimizer: MegatronOptimizer, *, wanted: bool) -> Iterator[None]:
    """Save or load moments within this block, in float32 whatever this run keeps them in."""
    if not wanted:
        yield
        return
    _install()
    # Megatron reads the step of every parameter, which a new AdamW does not have yet.
    for inner in _torch_optimizers(optimizer):
        create_state(inner)
    with ExitStack() as stack:
        for inner in _torch_optimizers(optimizer):
            if isinstance(inner, PlacedAdamW):
                stack.enter_context(inner.plain_state())
        yield


def adam_step(optimizer: MegatronOptimizer) -> int:
    """Return Adam's step, the maximum over ranks, because some train nothing; 0: no moments."""
    states = [state for inner in _torch_optimizers(optimizer) for state in inner.state.values()]
    steps = [state["step"] for state in states if "step" in state]
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, int(steps[0]) if steps else 0)
    return max(found)


def unshare_steps(optimizer: MegatronOptimizer) -> None:
    """Give each parameter its own step after a load, which shares one tensor that AdamW would advance."""
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if isinstance(state.get("step"), Tensor):
                    state["step"] = step_on_its_device(state["step"].clone(), parameter, group)


def _install() -> None:
    """Patch the distributed optimizer, once, before a save or load.

    It copies loaded values into its shards but fails on the step among them, and it has no step on a rank
    that trains nothing.
    """
    global _installed
    if _installed:
        return
    _installed = True
    # Only where a checkpoint is written or read.
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    @torch.no_grad()
    def set_states(self: DistributedOptimizer, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, index = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][index]
        targets = {"param": main, **self.optimizer.state[main]}
        for name, value in tensors.items():
            if name in targets and name != "step":
                targets[name].copy_(value)

    with_moments = DistributedOptimizer.state_dict

    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        if self.optimizer.state:
            return with_moments(self)
        found = self.optimizer.param_groups
        groups = [{name: value for name, value in group.items() if name != "params"} for group in found]
        return {"optimizer": {"param_groups": [{**group, "step": 0} for group in groups]}}

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    DistributedOptimizer.state_dict = state_dict
