"""Linear layers that multiply in FP8, in the forward pass and for both gradients.

Weights and gradients keep their 16 or 32 bits. Values are scaled again for each product. The backward pass
keeps input and weight in FP8, a byte per number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.fp8.scaling import ALIGNMENT, Scaled, by_rows, product, turned
from slime.utils.machine import accelerator

_SMALL = 64  # layers with fewer outputs are not converted: gates, routers
_TOLERANCE = 0.01  # largest difference, relative to the norm, between a product on the device and in fp32


class _Product(torch.autograd.Function):
    """input [T, K] @ weight [N, K].T"""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        left, right = by_rows(rows), by_rows(weight)
        ctx.save_for_backward(*left, *right)
        ctx.weight_dtype = weight.dtype
        return product(left, right, rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        left, left_factors, right, right_factors = ctx.saved_tensors
        scaled = by_rows(grad)
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = product(scaled, turned(Scaled(right, right_factors)), grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = product(turned(scaled), turned(Scaled(left, left_factors)), ctx.weight_dtype)
        return grad_rows, grad_weight


class FP8Linear(nn.Linear):
    """A linear layer whose three products are in FP8."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        out: Tensor = _Product.apply(rows, self.weight)
        out = out.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def use_fp8(layers: list[nn.Module], device: torch.device, dtype: torch.dtype) -> int:
    """Make the linear layers inside `layers` multiply in FP8, and return their number.

    Matrices of no linear layer (stacked experts, most routers) and gates with few outputs are unchanged.
    """
    if device.type == "cuda" and dtype != torch.bfloat16:
        raise ValueError("--fp8-training: FP8 products on a GPU end in bfloat16; use --dtype bfloat16.")
    check_device(device)
    found = [
        (name, module)
        for layer in layers
        for name, module in layer.named_modules()
        if type(module) is nn.Linear and module.out_features >= _SMALL
    ]
    if not found:
        raise ValueError("--fp8-training: the model's layers have no linear layers that it knows; remove it.")
    for name, module in found:
        if module.in_features % ALIGNMENT or module.out_features % ALIGNMENT:
            raise ValueError(
                f"--fp8-training: {name} is {module.out_features} x {module.in_features}, and FP8 products "
                f"take multiples of {ALIGNMENT} only; remove it."
            )
        module.__class__ = FP8Linear
    return len(found)


def check_device(
    device: torch.device,
    products: Callable[[Tensor], list[Tensor]] | None = None,
    tolerance: float = _TOLERANCE,
) -> None:
    """Compare `products` of a small matrix, by default a layer's three, with their emulation on a CPU."""
    products = products or _three_products
    if device.type != "cuda":
        return
    name = accelerator.gpu.get_device_name(device)
    if accelerator.has_fnuz(device):
        raise ValueError(
            f"--fp8-training: {name} multiplies e4m3fnuz, whose numbers end at 240, and slime scales for "
            "e4m3fn, which ends at 448; remove it."
        )
    matrix = torch.randn(72, 64, generator=torch.Generator().manual_seed(0))
    try:
        found = products(matrix.to(device))
    except (RuntimeError, NotImplementedError, AttributeError, ImportError) as error:
        raise ValueError(
            f"--fp8-training: torch {torch.__version__} has no FP8 products on {name} ({error}); remove it."
        ) from error
    for ours, expected in zip(found, products(matrix), strict=True):
        apart = ((ours.cpu() - expected).float().norm() / expected.float().norm()).item()
        if not apart < tolerance:
            raise ValueError(
                f"--fp8-training: FP8 products on {name} are off by {apart:.2g} of the norm; remove it."
            )


def _three_products(matrix: Tensor) -> list[Tensor]:
    """Return the three products of a layer and its gradients, with the transposes that each needs."""
    left, right = by_rows(matrix), by_rows(matrix[: matrix.shape[1]])
    pairs = [(left, right), (left, turned(right)), (turned(left), turned(left))]
    return [product(*pair, torch.bfloat16) for pair in pairs]
