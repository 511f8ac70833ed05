"""Megatron's experts by grouped products: one operator for all experts of a rank instead of one call each.

Parameters stay Megatron's, one pair per expert, so that checkpoints, gradient buffers and the optimizer are
not affected. In Megatron's flat buffers, a layer's experts lie at equal distances, last expert first, so that
one view covers all of them and another their gradients. Without such a buffer they are copied into one
tensor.
"""

import itertools
import types
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.experts.experts_operator import gated_experts
from slime.backends.megatron.fixes import list_kernels

_VIEW = "_slime_view"  # attribute of an expert's weight or gradient: the joint view of all experts, if any


def is_plain_mlp(config: TransformerConfig) -> bool:
    """Return whether an MLP, or an expert, is silu(gate) * up between two products without biases."""
    return bool(
        not config.add_bias_linear
        and config.gated_linear_unit
        and config.activation_func is F.silu
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0.0
    )


class GroupedExperts(SequentialMLP):
    """Experts that the operator computes in 16-bit passes on a GPU, if they are plain and gated by SiLU."""

    # Tests compare the operator with Megatron's own code on a CPU, where that is as fast.
    on_any_device = False
    # Whether backward adds to Megatron's gradient buffers itself; not if their hooks start a reduction.
    adds_gradients = False

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Compute rows that the dispatcher sorted by expert, given the number of rows of each expert."""
        rows = permuted_local_hidden_states
        if not self.can_group(rows):
            return super().forward(rows, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.to(rows.device)
        experts = torch.arange(len(self.local_experts), device=rows.device)
        chosen = torch.repeat_interleave(experts, counts, output_size=len(rows))
        return self.compute(rows, chosen[:, None], permuted_probs[:, None]), None

    def can_group(self, hidden: Tensor) -> bool:
        """Return whether the operator computes the same as Megatron's own code for these tokens."""
        on_gpu = hidden.is_cuda and hidden.dtype == torch.bfloat16
        # A rank whose experts were not chosen has no rows, which grouped products do not support.
        return (on_gpu or self.on_any_device) and hidden.numel() > 0 and _is_plain(self)

    def compute(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H], chosen and weights [T, k] -> [T, H]: the weighted sum of each token's experts."""
        first = [expert.linear_fc1.weight for expert in self.local_experts]
        second = [expert.linear_fc2.weight for expert in self.local_experts]
        if _view_of(first[::-1]) is not None and _view_of(second[::-1]) is not None:
            first, second, chosen = first[::-1], second[::-1], len(first) - 1 - chosen
        return gated_experts(hidden, self._side_by_side(first), self._side_by_side(second), chosen, weights)

    def _side_by_side(self, weights: list[Tensor]) -> Tensor:
        trained = self.adds_gradients and torch.is_grad_enabled()
        if trained and all(hasattr(weight, "main_grad") for weight in weights):
            return _Stacked.apply(*weights)
        return torch.stack(weights)


class _Stacked(torch.autograd.Function):
    """Stacks weights; adds their gradients to Megatron's buffers in one call instead of one hook each."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        view = _view_of(list(weights))
        return torch.stack(weights) if view is None else view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        buffers = [weight.main_grad for weight in ctx.weights]
        view, grad = _view_of(buffers), grads[0]
        empty = list_kernels.take_empty(ctx.weights)
        if view is not None and grad.is_cuda and grad.is_contiguous() and view.dtype == torch.float32:
            from slime.backends.shared import add_kernel  # Triton, which CPU machines need not have

            add_kernel.add_rows_(view, grad, empty=empty)
        elif view is not None:
            view.add_(grad)
        else:
            torch._foreach_add_(buffers, list(grad.unbind()))
        return (None,) * len(ctx.weights)


def _view_of(parts: list[Tensor]) -> Tensor | None:
    """`_one_view` of detached tensors; cached, because buffers stay in place."""
    place = parts[0].data_ptr(), parts[-1].data_ptr()
    known = getattr(parts[0], _VIEW, None)
    if known is None or known[0] != place:
        known = place, _one_view([part.detach() for part in parts])
        setattr(parts[0], _VIEW, known)
    view: Tensor | None = known[1]
    return view


def _one_view(parts: list[Tensor]) -> Tensor | None:
    """Return a single view of tensors at equal distances in one buffer; else None. The gradients of a layer's
    experts are like this, last expert first, unless a bucket ends between them.
    """
    first, offsets = parts[0], [part.storage_offset() for part in parts]
    step = offsets[1] - offsets[0] if len(parts) > 1 else first.numel()
    spaced = all(after - before == step for before, after in itertools.pairwise(offsets))
    alike = all(
        part.is_contiguous() and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for part in parts
    )
    if not (spaced and alike and step >= first.numel()):
        return None
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()), offsets[0])


def look_up_experts(layer: MoELayer) -> None:
    """Let a mixture whose experts all live on this rank look tokens up in place: nothing is sorted and sent.

    Megatron's own code is used if ranks share experts or parts of the layer are recomputed.
    """
    alone = layer.ep_group.size() == layer.attn_tp_group.size() == layer.experts.tp_group.size() == 1
    if alone and not (layer.moe_layer_recompute or layer.shared_expert_overlap):
        layer.forward = types.MethodType(_in_place, layer)


def _in_place(layer: MoELayer, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not layer.experts.can_group(hidden_states):
        return MoELayer.forward(layer, hidden_states, *args, **kwargs)
    shared = layer.shared_experts_compute(hidden_states)
    probs, routing_map = layer.route(hidden_states)
    chosen = routing_map.to(torch.int8).topk(layer.config.moe_router_topk, dim=1).indices
    hidden = hidden_states.view(-1, hidden_states.shape[-1])
    out = layer.experts.compute(hidden, chosen, probs.gather(1, chosen)).view_as(hidden_states)
    return (out if shared is None else out + shared), None


def _is_plain(experts: SequentialMLP) -> bool:
    config = experts.config
    first = experts.local_experts[0]
    return bool(
        type(first.linear_fc1) is ColumnParallelLinear
        and type(first.linear_fc2) is RowParallelLinear
        and is_plain_mlp(config)
        and not config.moe_apply_probs_on_input
    )
