"""Clipped regression loss of a critic."""

import torch
from torch import Tensor


def compute_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Per-token squared error, clipped or plain, whichever is larger, and whether the clip decided (0/1)."""
    moved = values - old_values
    # What the clip leaves alone stays as it is: the sum would differ by rounding, and count as held back.
    bounded = old_values + moved.clamp(-value_clip, value_clip)
    clipped = torch.where(moved.abs() <= value_clip, values, bounded)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(plain_error, clipped_error), (clipped_error > plain_error).to(values.dtype)
