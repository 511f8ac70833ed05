"""Packed attention and its backward pass as one operator, which compiled layers see as a single opaque call.

Boundaries of documents travel twice: as a tensor on the device for kernels, and on the host, where they
are read without waiting for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# query [T, H, D], key, value [T, G, D], bounds on device and host, scale -> output, kept for backward
Operator = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
# gradient, query, key, value, output, what was kept, bounds twice, scale -> gradients of query, key and value
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]
]


class NotInstalled(ImportError):
    """An operator needs a package that is not there, which is no fault of it."""


def packed_operator(
    name: str, forward: Operator, backward: Backward, kept_shape: Callable[[Tensor, Tensor], Sequence[int]]
) -> Operator:
    """The operator `slime::<name>`; `kept_shape(query, bounds)`: of the fp32 numbers kept for backward."""
    attend = torch.library.custom_op(f"slime::{name}", forward, mutates_args=())
    go_back = torch.library.custom_op(f"slime::{name}_backward", backward, mutates_args=())

    @attend.register_fake
    def _(
        query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, bounds: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        return out, query.new_empty(kept_shape(query, bounds), dtype=torch.float32)

    @go_back.register_fake
    def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_rest: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, cu_seqlens, bounds, ctx.scale = inputs
        ctx.save_for_backward(query, key, value, *output, cu_seqlens, bounds)

    def differentiate(ctx: Any, grad: Tensor, _grad_kept: Tensor) -> tuple[Tensor | None, ...]:
        return *go_back(grad, *ctx.saved_tensors, ctx.scale), None, None, None

    attend.register_autograd(differentiate, setup_context=keep)
    return attend
