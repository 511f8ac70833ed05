"""Filters for `--dynamic-sampling-filter-path`: drop groups whose rewards carry no signal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample, flatten_samples

_MIN_STD = 1e-6


def check_reward_nonzero_std(args: PluginArgs, samples: Sequence[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: equal rewards give zero advantages, so nothing to learn from."""
    rewards = _scored_rewards(args, flatten_samples(samples))
    if len(rewards) > 1 and statistics.stdev(rewards) > _MIN_STD:
        return DynamicFilterOutput(keep=True)
    reason = f"zero_std_{round(rewards[0], 1)}" if rewards else "no_scored_sample"
    return DynamicFilterOutput(keep=False, reason=reason)


def check_reward_nonzero_std_with_fallback(
    args: PluginArgs, samples: Sequence[Any], **kwargs: Any
) -> DynamicFilterOutput:
    """Like `check_reward_nonzero_std`, but equal rewards still fill a batch that would come up short."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    if not output.keep and output.reason != "no_scored_sample":
        output.keep_when_insufficient = True
    return output


def _scored_rewards(args: PluginArgs, samples: Sequence[Sample]) -> list[float]:
    """Rewards of the samples that have one; a sample that was never scored is a bug."""
    unscored = [s.index for s in samples if s.reward is None and s.reward_failure is None]
    if unscored:
        raise ValueError(f"dynamic sampling filter called before samples {unscored} were scored")
    return [s.get_reward_value(args) for s in samples if s.reward is not None]
