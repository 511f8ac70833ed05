"""Draws random weights, for measurements where only the shapes matter."""

from collections.abc import Sequence

import torch
from torch import nn


@torch.no_grad()
def draw_weights(chunks: Sequence[nn.Module], seed: int) -> None:
    """Fill matrices with small normal numbers, norms with one and biases with zero."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.ndim > 1:
                generator = torch.Generator(parameter.device).manual_seed(seed + len(name))
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
