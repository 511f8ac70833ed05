"""Distributes the experts of a layer over the ranks of a tensor-parallel group: each rank runs some, whole.

All ranks of the group have the same tokens and the same routing. Each rank computes the tokens that chose its
experts, and the results are summed over ranks; the backward pass sums the gradients of tokens and routing
weights.
"""

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

_MATRICES = ("gate_up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds experts as transformers does: one tensor [experts, ...] per matrix."""
    parameters = dict(module.named_parameters(recurse=False))
    return parameters.keys() == set(_MATRICES) and all(p.dim() == 3 for p in parameters.values())


def share_out(experts: Any, mesh: DeviceMesh) -> None:
    """Distribute the experts over the one-dimensional `mesh`, whose size must divide their number."""
    for name in _MATRICES:
        whole = getattr(experts, name)
        cut = nn.Parameter(distribute_tensor(whole.data, mesh, [Shard(0)]), requires_grad=whole.requires_grad)
        experts.register_parameter(name, cut)
    group, size, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    num_own: int = experts.num_experts // size
    run: Callable[..., Tensor] = type(experts).forward

    def forward(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        own = (chosen >= rank * num_own) & (chosen < (rank + 1) * num_own)
        # The index after the last expert means "none of them".
        chosen = torch.where(own, chosen - rank * num_own, num_own)
        weights = torch.where(own, _SumGradient.apply(weights, group), 0.0)
        mine = _local_view(module, num_own)
        return _Sum.apply(run(mine, _SumGradient.apply(hidden, group), chosen, weights), group)

    experts.forward = types.MethodType(forward, experts)


def _local_view(experts: nn.Module, num_own: int) -> nn.Module:
    """Return the module as its own code must see it: with this rank's experts alone, as plain tensors."""
    view = copy.copy(experts)
    view._parameters = {}
    vars(view).update({name: getattr(experts, name).to_local() for name in _MATRICES})
    vars(view).update(num_experts=num_own, _is_expert_parallel=True)
    return view


class _Sum(torch.autograd.Function):
    """Sums over the group in the forward pass; the gradient is already the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumGradient(torch.autograd.Function):
    """Passes values on unchanged, and sums their gradient over the group."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
