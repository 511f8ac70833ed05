"""Why a sample has no score. Light on purpose: check workers import it, and must not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a sample has no score. `invalid`: the answer cannot be judged; `infra_error`: the judge broke."""

    kind: Literal["invalid", "infra_error"]
    reason: str


@dataclass(frozen=True, slots=True)
class AnswerTooLarge(RewardFailure):
    """A built-in check gave an answer up: it asked for more time, memory or digits than any answer gets."""


def invalid(reason: str) -> RewardFailure:
    return RewardFailure("invalid", reason)


def infra_error(reason: str) -> RewardFailure:
    return RewardFailure("infra_error", reason)


def too_large(reason: str) -> AnswerTooLarge:
    return AnswerTooLarge("invalid", reason)
