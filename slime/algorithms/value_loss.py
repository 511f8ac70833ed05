"""Clipped regression loss of a critic."""

import torch
from torch import Tensor


def compute_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Return per-token squared error, the larger of clipped and plain, and whether it is clipped (0/1)."""
    moved = values - old_values
    # Unclipped values are used as they are: old + difference would round, and count as clipped.
    bounded = old_values + moved.clamp(-value_clip, value_clip)
    clipped = torch.where(moved.abs() <= value_clip, values, bounded)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(plain_error, clipped_error), (clipped_error > plain_error).to(values.dtype)
