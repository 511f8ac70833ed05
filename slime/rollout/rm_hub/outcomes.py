"""Reward outcomes: a score is stored as a number; anything else becomes a named failure, never a number."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from slime.algorithms.reward_shaping import combine_rewards
from slime.arguments import PluginArgs
from slime.arguments.groups.rewards import WEIGHTED_REWARD_KEY
from slime.utils.errors import RunStopped
from slime.utils.reward_failure import RewardFailure, invalid
from slime.utils.types import Sample, is_score


class RewardConfigError(ValueError):
    """A reward that can never work as configured: no retry helps, the run stops at once."""


class RewardFailuresExceeded(RunStopped):
    """Rewards kept failing, so the run stops with the cause instead of training on nothing."""


def store(sample: Sample, outcome: Any) -> None:
    """Store what `judge` returned: a score in `reward`, or a failure in `reward_failure`."""
    if isinstance(outcome, RewardFailure):
        sample.reward, sample.reward_failure = None, outcome
    else:
        sample.reward, sample.reward_failure = outcome, None


def judge(args: PluginArgs, value: Any, *, evaluation: bool = False) -> Any:
    """Return the value as a score, a number or a dict whose chosen key is one; or else a failure."""
    if isinstance(value, RewardFailure):
        return value
    if isinstance(value, dict):
        return _judge_dict(args, value, evaluation)
    number = _plain_number(value)
    return number if is_score(number) else invalid(f"reward is {_describe(value)}, not a finite number")


def _judge_dict(args: PluginArgs, value: dict[str, Any], evaluation: bool) -> Any:
    flag, key = ("--reward-key", args.reward_key)
    if evaluation and args.eval_reward_key:
        flag, key = ("--eval-reward-key", args.eval_reward_key)
    if not key:
        if args.custom_reward_post_process_path and not evaluation:
            return value  # that hook chooses what counts
        found = f"the reward is a dict with keys {sorted(map(str, value))}"
        raise RewardConfigError(f"{found} but --reward-key is not set: name the key to train on")
    weights = args.reward_weights if key == WEIGHTED_REWARD_KEY else None
    if not weights and key not in value:
        return invalid(f"reward dict has no {flag} {key!r}; its keys are {sorted(map(str, value))}")
    names = [name for name in weights if name in value] if weights else [key]
    numbers = {name: _plain_number(value[name]) for name in names}
    for name, number in numbers.items():
        if not is_score(number):
            return invalid(f"reward[{name!r}] is {_describe(value[name])}, not a finite number")
    try:
        weighted = {key: combine_rewards(numbers, weights)} if weights else {}
    except ValueError as error:
        return invalid(str(error))
    return {**value, **numbers, **weighted}


def _plain_number(value: Any) -> Any:
    """Convert 0-d arrays, tensors, decimals and fractions to Python numbers, and booleans to 0.0 and 1.0."""
    if isinstance(value, (bool, Decimal, Fraction)):
        return float(value)
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        try:
            return value.item()
        except (ValueError, RuntimeError):
            return value  # more than one element: no score
    return value


def _describe(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int):
        return f"an integer of {value.bit_length()} bits"  # Python writes out no longer ones
    return "None" if value is None else f"{type(value).__name__} {str(value)[:80]!r}"
