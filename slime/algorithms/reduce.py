"""Reductions from per-token values to one number: each is a sum, and the caller owns the denominator.

Flat layout: the response tokens of all samples of a micro-batch in a row; `segments[j]` is the sample of
token j. Dividing by a count of the whole optimizer step makes a loss independent of packing and ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slime.catalog.policy_losses import REDUCTIONS

Reducer = Callable[[Tensor], Tensor]


def reduction_weights(
    reduction: str,
    mask: Tensor,
    segments: Tensor,
    rollout_mask_sums: Tensor,
    *,
    constant: int | None = None,
) -> Tensor:
    """Return each flat token's weight in a reduction (a row of REDUCTIONS).

    `rollout_mask_sums` [S] holds, per sample, the mask total over all samples of the same rollout.
    """
    mask = mask.to(rollout_mask_sums.dtype)
    if reduction == "rollout_mean":
        return mask / rollout_mask_sums.clamp(min=1.0)[segments]
    if reduction == "token_mean":
        return mask
    if reduction == "sample_mean":
        return mask / segment_sum(mask, segments, len(rollout_mask_sums)).clamp(min=1.0)[segments]
    if reduction == "constant":
        assert constant, "the constant reduction needs its denominator"
        return mask / constant
    raise ValueError(f"--loss-reduction is {reduction!r}: choose one of {', '.join(REDUCTIONS)}.")


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum values x weights; a token of weight 0 contributes 0 whatever its value (even NaN)."""
    return torch.where(weights != 0, values * weights, torch.zeros_like(values)).sum()


def segment_sum(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Return [S] sums of the flat values of each sample."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def segment_mean(values: Tensor, mask: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Return [S] masked means of the flat values of each sample; 0 for a sample with an empty mask."""
    mask = mask.to(values.dtype)
    totals = segment_sum(
        torch.where(mask != 0, values * mask, torch.zeros_like(values)), segments, num_segments
    )
    return totals / segment_sum(mask, segments, num_segments).clamp(min=1.0)
