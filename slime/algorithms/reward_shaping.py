"""Shapes raw rewards before advantages: joins components, shapes by length, compares within groups.

A group is every sample with the same group index, whatever its size. One rollout may have fanned out into
several samples (they share a rollout id); such siblings count once in the statistics, as the mean of their
rewards.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

STD_EPSILON = 1e-6
# Key of Sample.metadata: the reward of the greedy response to the sample's prompt.
GREEDY_REWARD_KEY = "greedy_reward"


@dataclass(frozen=True)
class GroupRollouts:
    """The n rollouts of one group.

    Example: a rollout that fanned out into samples of rewards 1 and 0 with 3 and 4 trained tokens is one
    entry: reward 0.5, length 7.
    """

    rewards: list[float]  # [n] mean over siblings
    lengths: list[float]  # [n] trained tokens, summed over siblings
    greedy_reward: float | None = None  # of the same prompt, decoded greedily; None: not measured

    @property
    def mean(self) -> float:
        return math.fsum(self.rewards) / len(self.rewards)

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for one rollout."""
        mean, others = self.mean, max(len(self.rewards) - 1, 1)
        return math.sqrt(math.fsum((reward - mean) ** 2 for reward in self.rewards) / others)


# (baseline, scale) for each rollout of a group: its advantage is (reward - baseline) / scale.
Baselines = list[tuple[float, float]]


def mean_baseline(group: GroupRollouts) -> Baselines:
    """Compare rewards with the mean of their group."""
    return [(group.mean, 1.0)] * len(group.rewards)


def mean_std_baseline(group: GroupRollouts) -> Baselines:
    """Compare with the group's mean, in units of its standard deviation."""
    spread = max(group.rewards) - min(group.rewards)
    # Rollouts of equal mean may have siblings of unequal reward; divided by epsilon, these would dominate.
    equal = spread <= 1e-12 * max(1.0, *map(abs, group.rewards))
    return [(group.mean, 1.0 if equal else group.std + STD_EPSILON)] * len(group.rewards)


def leave_one_out_baseline(group: GroupRollouts) -> Baselines:
    """Compare with the mean of the other rollouts, which is independent of this one, hence unbiased."""
    total, others = math.fsum(group.rewards), len(group.rewards) - 1
    return [((total - reward) / others if others else reward, 1.0) for reward in group.rewards]


def length_weighted_baseline(group: GroupRollouts) -> Baselines:
    """Compare with the length-weighted mean: optimal if the squared gradient grows with response length."""
    weight = math.fsum(group.lengths)
    if weight == 0:
        return mean_baseline(group)
    weighted = math.fsum(reward * length for reward, length in zip(group.rewards, group.lengths, strict=True))
    return [(weighted / weight, 1.0)] * len(group.rewards)


def success_rate_baseline(group: GroupRollouts) -> Baselines:
    """Compare with the group's mean, in units of that mean: the gradient of the log success rate."""
    if min(group.rewards) < 0:
        raise ValueError(
            f"a reward of {min(group.rewards)}: --advantage-estimator maxrl divides by the mean reward, so "
            "rewards must be at least 0; shift them, or choose another estimator."
        )
    return [(group.mean, group.mean or 1.0)] * len(group.rewards)


def greedy_baseline(group: GroupRollouts) -> Baselines:
    """Compare with the reward of the greedy response to the same prompt."""
    if group.greedy_reward is None:
        raise ValueError(
            "--advantage-estimator remax compares with the greedy response, but the samples have no "
            "metadata['greedy_reward']: use the default rollout function, or set it in your own."
        )
    return [(group.greedy_reward, 1.0)] * len(group.rewards)


BASELINES: dict[str, Callable[[GroupRollouts], Baselines]] = {
    "mean": mean_baseline,
    "mean_std": mean_std_baseline,
    "leave_one_out": leave_one_out_baseline,
    "length_weighted": length_weighted_baseline,
    "success_rate": success_rate_baseline,
    "greedy": greedy_baseline,
}


def subtract_baselines(
    rewards: Sequence[float],
    group_index: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    baseline: str,
    lengths: Sequence[float] | None = None,
    greedy_rewards: Sequence[float | None] | None = None,
) -> list[float]:
    """(reward - baseline) / scale of each sample, by a row of BASELINES over the sample's group.

    A group of one rollout has nothing to be compared with, except the greedy response: its samples get 0.
    """
    compute = BASELINES[baseline]
    members: dict[int, list[int]] = defaultdict(list)
    for position, index in enumerate(group_index):
        members[index].append(position)
    result = [0.0] * len(rewards)
    for positions in members.values():
        siblings: dict[int, list[int]] = {}
        for p in positions:
            siblings.setdefault(rollout_ids[p], []).append(p)
        if len(siblings) == 1 and baseline != "greedy":
            continue
        group = GroupRollouts(
            rewards=[math.fsum(rewards[p] for p in own) / len(own) for own in siblings.values()],
            lengths=[math.fsum(lengths[p] for p in own) for own in siblings.values()] if lengths else [],
            greedy_reward=None if greedy_rewards is None else greedy_rewards[positions[0]],
        )
        for own, (shift, scale) in zip(siblings.values(), compute(group), strict=True):
            for p in own:
                result[p] = (rewards[p] - shift) / scale
    return result


def combine_rewards(components: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of the named components; components without a weight are only logged."""
    missing = [name for name in weights if name not in components]
    if missing:
        raise ValueError(
            f"the reward has no component {missing[0]!r} of --reward-weights; it has "
            f"{sorted(map(str, components))}."
        )
    return math.fsum(weight * components[name] for name, weight in weights.items())


def overlong_penalty(length: int, max_length: int, buffer_length: int) -> float:
    """0 up to `max_length - buffer_length` tokens, then linear to -1 at `max_length` (DAPO)."""
    excess = length - (max_length - buffer_length)
    return -min(max(excess, 0), buffer_length) / buffer_length
