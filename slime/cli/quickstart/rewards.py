"""Rewards of the quick-start tasks: 1 for a correct response that was not truncated, else 0; and controls.

A control rewards coin tosses with about the same average and changes nothing else. If accuracy rises all the
same, the reward is not the cause.
"""

import argparse
import random
import re
from collections import deque
from typing import Any

from slime.cli.quickstart.tiny import EOS
from slime.utils.types import Sample

COIN_FLOOR = 0.2  # keeps groups mixed when the control has driven the true score to zero
NUM_REMEMBERED = 512  # samples, about one step
_recent_scores: deque[float] = deque(maxlen=NUM_REMEMBERED)


async def exact_match(args: argparse.Namespace, sample: Sample, **kwargs: Any) -> float:
    """Return 1 if the whole response is the label."""
    return float(_ended(sample) and sample.response.removesuffix(EOS) == sample.label)


async def last_number(args: argparse.Namespace, sample: Sample, **kwargs: Any) -> float:
    """Return 1 if the last number in the response is the label."""
    numbers = re.findall(r"\d+", sample.response)
    return float(_ended(sample) and bool(numbers) and numbers[-1] == sample.label)


async def exact_match_control(args: argparse.Namespace, sample: Sample, **kwargs: Any) -> float:
    """Toss a coin in place of `exact_match`."""
    return _coin(args, sample, await exact_match(args, sample))


async def last_number_control(args: argparse.Namespace, sample: Sample, **kwargs: Any) -> float:
    """Toss a coin in place of `last_number`."""
    return _coin(args, sample, await last_number(args, sample))


def _ended(sample: Sample) -> bool:
    """Return whether the response is complete: stopping in time is part of the task."""
    return sample.status == Sample.Status.COMPLETED


def _coin(args: argparse.Namespace, sample: Sample, true_score: float) -> float:
    _recent_scores.append(true_score)
    chance = max(COIN_FLOOR, sum(_recent_scores) / len(_recent_scores))
    toss = random.Random(f"{args.rollout_seed}-{sample.index}").random()
    return float(toss < chance)
