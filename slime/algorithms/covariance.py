"""Which tokens a covariance-based loss treats apart: those whose log-prob and advantage deviate together.

The choice is made over all trained tokens of an optimizer step and all ranks, which exchange only sums.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]
BISECTIONS = 64


def token_covariances(
    advantages: Sequence[Tensor], log_probs: Sequence[Tensor], masks: Sequence[Tensor], total: SumOverRanks
) -> list[Tensor]:
    """[R_i] float64: (advantage - mean) x (log-prob - mean), means over the trained tokens of all ranks."""
    sums = torch.zeros(3, dtype=torch.float64)
    for advantage, log_prob, mask in zip(advantages, log_probs, masks, strict=True):
        mask = mask.double()
        sums += torch.stack([(advantage.double() * mask).sum(), (log_prob.double() * mask).sum(), mask.sum()])
    advantage_sum, log_prob_sum, count = total(sums).tolist()
    count = max(count, 1.0)
    return [
        (advantage.double() - advantage_sum / count) * (log_prob.double() - log_prob_sum / count)
        for advantage, log_prob in zip(advantages, log_probs, strict=True)
    ]


def select_largest(
    scores: Sequence[Tensor], allowed: Sequence[Tensor], count: int, total: SumOverRanks
) -> list[Tensor]:
    """[R_i] float 0/1: about the `count` largest scores among the allowed tokens of all ranks, never more.

    The threshold is found by bisection on counts. Tokens of equal score are taken together or not at all.
    """
    own = torch.cat([s[a.bool()] for s, a in zip(scores, allowed, strict=True)]) if scores else torch.zeros(0)
    available = int(total(torch.tensor([len(own)], dtype=torch.float64)))
    if count <= 0 or available == 0:
        return [torch.zeros_like(s, dtype=torch.float32) for s in scores]
    if available <= count:
        return [a.float() for a in allowed]
    # Largest magnitude over all ranks from sums alone: the next power of two that no score exceeds.
    high = 1.0
    while int(total((own.abs() > high).sum().double()[None])) > 0:
        high *= 2.0
    low = -high * 2.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        above = int(total((own > middle).sum().double()[None]))
        low, high = (middle, high) if above > count else (low, middle)
    return [((s > high) & a.bool()).float() for s, a in zip(scores, allowed, strict=True)]


def select_kl_cov(
    advantages: Sequence[Tensor],
    log_probs: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    ratio: float,
    total: SumOverRanks,
) -> list[Tensor]:
    """The share `ratio` of trained tokens (at least one) with the largest covariance."""
    covariances = token_covariances(advantages, log_probs, masks, total)
    return select_largest(covariances, masks, _count(masks, ratio, total), total)


def select_clip_cov(
    advantages: Sequence[Tensor],
    log_probs: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    ratio: float,
    low: float,
    high: float,
    seeds: Sequence[int],
    total: SumOverRanks,
) -> list[Tensor]:
    """A random share `ratio` of trained tokens (at least one), among those with covariance in [low, high].

    `seeds` [N] draw each sample's random keys: the same samples give the same choice wherever they lie.
    """
    covariances = token_covariances(advantages, log_probs, masks, total)
    within = [((c >= low) & (c <= high)).float() * m for c, m in zip(covariances, masks, strict=True)]
    keys = [
        torch.rand(len(m), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for m, seed in zip(masks, seeds, strict=True)
    ]
    return select_largest(keys, within, _count(masks, ratio, total), total)


def _count(masks: Sequence[Tensor], ratio: float, total: SumOverRanks) -> int:
    trained = float(total(torch.tensor([sum(float(mask.sum()) for mask in masks)], dtype=torch.float64)))
    return max(1, math.floor(ratio * trained)) if ratio > 0 else 0
