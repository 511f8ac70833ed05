"""Defines why a sample has no score. Imports nothing heavy: check workers must not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Reason why a sample has no score. `invalid`: it cannot be judged; `infra_error`: the judge failed."""

    kind: Literal["invalid", "infra_error"]
    reason: str


@dataclass(frozen=True, slots=True)
class ComparisonTooLarge(RewardFailure):
    """A built-in check exceeded its limit of time, memory or digits."""


def invalid(reason: str) -> RewardFailure:
    return RewardFailure("invalid", reason)


def infra_error(reason: str) -> RewardFailure:
    return RewardFailure("infra_error", reason)


def too_large(reason: str) -> ComparisonTooLarge:
    return ComparisonTooLarge("invalid", reason)
