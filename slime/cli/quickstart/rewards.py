"""Rewards of the quick-start tasks: 1 for a right response that was not truncated, else 0; and controls.

A control tosses a coin for each sample instead, with about the same average, and changes nothing else:
an accuracy that still rises was not taught by the reward.
"""

import argparse
import random
import re
from collections import deque
from typing import Any

from slime.cli.quickstart.tiny import EOS
from slime.utils.types import Sample

COIN_FLOOR = 0.2  # keeps groups mixed when the control has driven the true score to zero
NUM_REMEMBERED = 512  # about one step of samples
_recent_scores: deque[float] = deque(maxlen=NUM_REMEMBERED)


async def exact_match(args: argparse.Namespace, sample: Sample, **kwargs: Any) -> float:
    """The whole reply is the label."""
    return float(_ended(sample) and sample.response.removesuffix(EOS) == sample.label)


async def last_number(args: argparse.Namespace, sample: Sample, **kwargs: Any) -> float:
    """The last number in the reply is the label."""
    numbers = re.findall(r"\d+", sample.response)
    return float(_ended(sample) and bool(numbers) and numbers[-1] == sample.label)


async def exact_match_control(args: argparse.Namespace, sample: Sample, **kwargs: Any) -> float:
    """A coin in place of `exact_match`."""
    return _coin(args, sample, await exact_match(args, sample))


async def last_number_control(args: argparse.Namespace, sample: Sample, **kwargs: Any) -> float:
    """A coin in place of `last_number`."""
    return _coin(args, sample, await last_number(args, sample))


def _ended(sample: Sample) -> bool:
    """A truncated reply earns nothing: stopping is part of the task."""
    return sample.status == Sample.Status.COMPLETED


def _coin(args: argparse.Namespace, sample: Sample, true_score: float) -> float:
    _recent_scores.append(true_score)
    chance = max(COIN_FLOOR, sum(_recent_scores) / len(_recent_scores))
    toss = random.Random(f"{args.rollout_seed}-{sample.index}").random()
    return float(toss < chance)
