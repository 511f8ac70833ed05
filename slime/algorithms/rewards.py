"""Turns raw rewards into group-relative ones: minus the group mean, optionally over the group's standard deviation.

A group is every sample with the same group index, whatever its size. One rollout may have fanned out into several
samples (they share a rollout id); such siblings count once in the statistics, as the mean of their rewards.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

STD_EPSILON = 1e-6


def group_statistics(rewards: Sequence[float], rollout_ids: Sequence[int]) -> tuple[float, float, int]:
    """Mean, unbiased standard deviation (0 for one rollout) and number of rollouts of one group."""
    by_rollout: dict[int, list[float]] = defaultdict(list)
    for reward, rollout_id in zip(rewards, rollout_ids, strict=True):
        by_rollout[rollout_id].append(reward)
    values = [math.fsum(siblings) / len(siblings) for siblings in by_rollout.values()]
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0, 1
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance), len(values)


def normalize_group_rewards(
    rewards: Sequence[float],
    group_index: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    divide_by_std: bool,
) -> list[float]:
    """Centre each reward on its group's mean and, with `divide_by_std`, scale by the group's std + 1e-6.

    A group that holds one rollout has nothing to be compared with: its samples get 0.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for position, group in enumerate(group_index):
        members[group].append(position)
    normalized = [0.0] * len(rewards)
    for positions in members.values():
        mean, std, num_rollouts = group_statistics(
            [rewards[p] for p in positions], [rollout_ids[p] for p in positions]
        )
        if num_rollouts == 1:
            continue
        scale = std + STD_EPSILON if divide_by_std else 1.0
        for p in positions:
            normalized[p] = (rewards[p] - mean) / scale
    return normalized
