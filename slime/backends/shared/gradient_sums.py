"""Sums of 16-bit gradients in fp32, which trainers keep over the micro-batches of a step."""

import torch
from torch import Tensor

_LARGE = 1 << 23


def add_gradient_(total: Tensor, part: Tensor, *, empty: bool = False) -> None:
    """Add `part` to `total`, by the faster kernel if it is worth its launch. `empty`: `total` is zero."""
    fits = total.is_cuda and total.dtype == torch.float32 and total.is_contiguous() and part.is_contiguous()
    # So large that the addition takes longer than launching a kernel from Python.
    if fits and total.numel() >= _LARGE:
        from slime.backends.shared import add_kernel  # Triton, which CPU machines need not have

        add_kernel.add_(total, part, empty=empty)
    else:
        total.add_(part)
