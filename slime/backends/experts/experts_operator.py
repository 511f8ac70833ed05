"""A layer's gated experts as one operator with its own backward pass, opaque to compiled layers.

    hidden [T, H], gate_up [E, 2I, H], down [E, H, I], chosen [T, k], weights [T, k]  ->  [T, H]

Choices are sorted by expert, so that each product is one grouped matrix product. The routing weight is
applied between the two products, where rows are shortest. The backward pass needs the first product and the
order; it recomputes gathered tokens and gated values, which costs less than reading them from memory.
`chosen` may hold E for "none of these experts": such a choice adds nothing.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.experts.fp8_experts import FP8Steps

# output, first product [S, 2I], order [S], place [T, k], ends [E]
Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _sorted_choices(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return order of the choices by expert [S], row of each choice [T, k], ends of the experts' rows [E]."""
    # With 16-bit keys a radix sort needs half the passes.
    ids, order = torch.sort(chosen.flatten().to(torch.int16), stable=True)
    place = torch.empty_like(order, dtype=torch.int32)
    place[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    experts = torch.arange(num_experts, dtype=torch.int16, device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    return order.to(torch.int32), place.view(chosen.shape), ends


@torch.library.custom_op("slime::gated_experts", mutates_args=())
def _forward(
    hidden: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, fp8: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    order, place, ends = _sorted_choices(chosen, len(gate_up))
    hidden, weights = hidden.contiguous(), weights.contiguous()
    steps = _steps(hidden, fp8)
    rows = steps.gather(hidden, order, chosen.shape[1])
    both = steps.product(rows, gate_up.transpose(1, 2), ends)
    gated = steps.gate(both, weights, order)
    out = steps.combine(steps.product(gated, down.transpose(1, 2), ends), place, ends)
    return out, both, order, place, ends


@_forward.register_fake
def _(
    hidden: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, fp8: bool = False
) -> Forward:
    choices = chosen.shape[0] * chosen.shape[1]
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format),
        hidden.new_empty(choices, gate_up.shape[1]),
        chosen.new_empty(choices, dtype=torch.int32),
        chosen.new_empty(chosen.shape, dtype=torch.int32),
        chosen.new_empty(gate_up.shape[0], dtype=torch.int32),
    )


@torch.library.custom_op("slime::gated_experts_backward", mutates_args=())
def _backward(
    grad: Tensor,
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    both: Tensor,
    order: Tensor,
    place: Tensor,
    ends: Tensor,
    train_experts: bool,
    fp8: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, hidden, weights = grad.contiguous(), hidden.contiguous(), weights.contiguous()
    steps, top_k = _steps(hidden, fp8), place.shape[1]
    grad_rows = steps.gather(grad, order, top_k)
    grad_gated = steps.product(grad_rows, down, ends)
    grad_both, gated, grad_weights = steps.gate_backward(both, weights, order, grad_gated)
    if train_experts:
        grad_down = steps.outer(grad_rows, gated, ends)
        grad_gate_up = steps.outer(grad_both, steps.gather(hidden, order, top_k), ends)
    else:
        grad_gate_up, grad_down = gate_up.new_empty(0), down.new_empty(0)
    grad_hidden = steps.combine(steps.product(grad_both, gate_up, ends), place, ends)
    known = place < ends[-1]
    grad_weights = torch.where(known, grad_weights.view(place.shape), 0.0).to(weights.dtype)
    return grad_hidden, grad_gate_up, grad_down, grad_weights


@_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    whole = (gate_up, down) if rest[-2] else (gate_up.new_empty(0), down.new_empty(0))
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (hidden, *whole, weights)]
    return tuple(made)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Forward) -> None:
    hidden, gate_up, down, _chosen, weights, ctx.fp8 = inputs
    ctx.save_for_backward(hidden, gate_up, down, weights, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_unused: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None, None
    train_experts = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    found = _backward(grad, *ctx.saved_tensors, train_experts, ctx.fp8)
    grad_gate_up, grad_down = (found[1], found[2]) if train_experts else (None, None)
    return found[0], grad_gate_up, grad_down, None, found[3], None


_forward.register_autograd(_differentiate, setup_context=_keep)


def gated_experts(
    hidden: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, fp8: bool = False
) -> Tensor:
    """The sum over each token's experts of weight * down(silu(gate) * up). `fp8`: all products in FP8."""
    return _forward(hidden, gate_up, down, chosen, weights, fp8)[0]


# -- the steps -----------------------------------------------------------------------------------------------


def _steps(hidden: Tensor, fp8: bool) -> Any:
    steps: Any = _Plain
    if hidden.is_cuda:
        from slime.backends.experts import experts_kernels  # Triton, which CPU machines need not have

        steps = experts_kernels
    return FP8Steps(steps, hidden.dtype) if fp8 else steps


class _Plain:
    """The steps in plain torch, for any device and precision; rows past the last end stay zero."""

    @staticmethod
    def gather(source: Tensor, order: Tensor, top_k: int) -> Tensor:
        return source.index_select(0, order // top_k)

    @staticmethod
    def combine(rows: Tensor, place: Tensor, ends: Tensor) -> Tensor:
        found = rows.index_select(0, place.flatten()).view(*place.shape, -1)
        return torch.where((place < ends[-1])[..., None], found, 0.0).sum(1).to(rows.dtype)

    @staticmethod
    def product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        out = rows.new_zeros(len(rows), matrices.shape[2])
        for matrix, (begin, end) in zip(matrices, itertools.pairwise([0, *ends.tolist()]), strict=True):
            out[begin:end] = rows[begin:end] @ matrix
        return out

    @staticmethod
    def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        bounds = [0, *ends.tolist()]
        parts = itertools.pairwise(bounds)
        return torch.stack([left[begin:end].T @ right[begin:end] for begin, end in parts])

    @staticmethod
    def gate(both: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=1)
        return F.silu(gate) * up * weights.flatten()[order, None]

    @staticmethod
    def gate_backward(
        both: Tensor, weights: Tensor, order: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = both.chunk(2, dim=1)
        weight, share = weights.flatten()[order, None], torch.sigmoid(gate)
        silu = gate * share
        by_choice = torch.empty(len(order), dtype=grad.dtype, device=grad.device)
        by_choice[order.long()] = (grad * silu * up).sum(1)
        grad = grad * weight
        grad_gate = grad * up * (share + silu * (1 - share))
        return torch.cat((grad_gate, grad * silu), dim=1), silu * up * weight, by_choice
