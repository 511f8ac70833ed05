"""Two functions, packed attention and its way back, as one operator that
compiled layers see as a single opaque call.

Boundaries of documents travel twice: as a tensor on the device for kernels, and on the host, where they
are read without waiting for the device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# query [T, H, D], key and value [T, G, D], boundaries on the device and on the
# host, scale -> output, numbers for backward
Operator = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
# gradient, query, key, value, output, those numbers, boundaries twice,
# scale -> gradients of query, key and value
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]
]


class NotInstalled(ImportError):
    """An operator needs a package that is not there, which is no fault of it."""


def packed_operator(
    name: str, forward: Operator, backward: Backward, kept_shape: Callable[[Tensor, Tensor], Sequence[int]]
) -> Operator:
    """The operator `slime::<name>`; `kept_shape(query, bounds)` is the
    shape of the fp32 numbers kept for backward.
    """
    attend = torch.library.custom_op(f"slime::{name}", forward, mutates_args=())
    go_back = torch.library.custom_op(f"slime::{name}_backward", backward, mutates_args=())

    @attend.register_fake
    def _(query, key, value, cu_seqlens, bounds, scale):
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        return out, query.new_empty(kept_shape(query, bounds), dtype=torch.float32)

    @go_back.register_fake
    def _(grad, query, key, value, out, kept, cu_seqlens, bounds, scale):
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))

    def keep(ctx, inputs, output):
        query, key, value, cu_seqlens, bounds, ctx.scale = inputs
        ctx.save_for_backward(query, key, value, *output, cu_seqlens, bounds)

    def differentiate(ctx, grad, _grad_kept):
        return *go_back(grad, *ctx.saved_tensors, ctx.scale), None, None, None

    attend.register_autograd(differentiate, setup_context=keep)
    return attend
