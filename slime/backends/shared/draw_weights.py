"""Draws random weights, for measurements where only the shapes matter."""

from collections.abc import Iterable

import torch
from torch import Tensor

from slime.backends.shared.placed_adam import local


@torch.no_grad()
def draw_weights(named: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Fill matrices with small normal numbers, norms with one and biases with zero."""
    for name, tensor in named:
        own = local(tensor)
        if tensor.ndim > 1:
            generator = torch.Generator(own.device).manual_seed(seed + len(name))
            own.normal_(0.0, 0.02, generator=generator)
        else:
            own.fill_(0.0 if name.endswith("bias") else 1.0)
