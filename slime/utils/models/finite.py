"""Checks that weights are finite: a single NaN makes every token of an engine meaningless."""

import math
from collections.abc import Sequence

import torch


def _extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest value; NaN if any is."""
    values = tensor.float() if tensor.element_size() == 1 else tensor  # torch has no min of 8-bit floats
    low, high = torch.aminmax(values)
    return low, high


@torch.no_grad()
def is_finite(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether all values are finite, also when rounded to `dtype`; only the extremes are rounded."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(math.isfinite(edge.to(dtype or torch.float64).item()) for edge in _extremes(tensor))


@torch.no_grad()
def first_non_finite(named: Sequence[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first tensor that is not finite; synchronises with the device once."""
    floats = [(name, tensor) for name, tensor in named if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return None
    edges = torch.stack([edge.double() for _, tensor in floats for edge in _extremes(tensor)])
    sound = edges.isfinite().view(-1, 2).all(1).tolist()
    return next((name for (name, _), well in zip(floats, sound, strict=True) if not well), None)
