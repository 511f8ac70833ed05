"""Packed attention and its backward pass as one operator, which compiled layers see as a single opaque call.

Document boundaries are passed twice: as a tensor on the device for kernels, and on the host, where they can
be read without waiting for the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# query [T, H, D], key, value [T, G, D], bounds on device and host, scale -> output, kept for backward
Operator = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


class NotInstalled(ImportError):
    """Raised by an operator whose package is not installed; this does not count as a failure of its trial."""


def packed_operator(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], kept_shape: Callable[..., Any]
) -> Any:
    """The operator `slime::<name>`; `kept_shape(*inputs)`: of the fp32 numbers kept for backward.

    Inputs are query, key, value, tensors that say where documents are, and a scale. `backward` gets the
    gradient, query, key, value, both outputs, and the rest of the inputs.
    """
    attend = torch.library.custom_op(f"slime::{name}", forward, mutates_args=())
    go_back = torch.library.custom_op(f"slime::{name}_backward", backward, mutates_args=())

    @attend.register_fake
    def _(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        return out, query.new_empty(kept_shape(query, *rest), dtype=torch.float32)

    @go_back.register_fake
    def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_rest: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, *layout, ctx.scale = inputs
        ctx.save_for_backward(query, key, value, *output, *layout)
        ctx.others = len(layout) + 1

    def differentiate(ctx: Any, grad: Tensor, _grad_kept: Tensor) -> tuple[Tensor | None, ...]:
        return *go_back(grad, *ctx.saved_tensors, ctx.scale), *[None] * ctx.others

    attend.register_autograd(differentiate, setup_context=keep)
    return attend
