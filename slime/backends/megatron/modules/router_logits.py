"""Computes router logits in fp32 from 16-bit factors, on 16-bit matrix units.

Megatron converts both factors to fp32 first, which gives the same product many times slower.
"""

from typing import Any

import torch
from torch import Tensor


class RouterLogits(torch.autograd.Function):
    """Multiplies hidden [T, H] and weight [E, H] in bfloat16 -> [T, E] fp32; gradients are in bfloat16."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _product(hidden, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        # Two 16-bit numbers hold the part of an fp32 number that matters in a 16-bit result.
        high = grads[0].bfloat16()
        halves = torch.cat([high, (grads[0] - high).bfloat16()], dim=1)
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = halves @ torch.cat([weight, weight])
        if ctx.needs_input_grad[1]:
            both = _product(halves.t(), hidden)
            grad_weight = (both[: len(weight)] + both[len(weight) :]).to(weight.dtype)
        return grad_hidden, grad_weight


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
