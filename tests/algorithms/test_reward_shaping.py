"""Group normalisation against the obvious computation, for any group sizes and fan-out."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.reward_shaping import subtract_baselines


def test_groups_follow_their_index_whatever_their_sizes_and_order():
    rewards = [1.0, 10.0, 3.0, 20.0, 30.0]
    groups = [7, 2, 7, 2, 2]
    result = subtract_baselines(rewards, groups, range(5), baseline="mean_std")
    std7, std2 = statistics.stdev([1.0, 3.0]), statistics.stdev([10.0, 20.0, 30.0])
    assert result == pytest.approx(
        [-1 / (std7 + 1e-6), -10 / (std2 + 1e-6), 1 / (std7 + 1e-6), 0, 10 / (std2 + 1e-6)]
    )


def test_without_std_rewards_are_only_centred():
    assert subtract_baselines([0.0, 1.0], [0, 0], [0, 1], baseline="mean") == [-0.5, 0.5]


def test_a_group_of_one_rollout_gets_no_advantage():
    assert subtract_baselines([5.0, 1.0, 2.0], [0, 1, 1], [0, 1, 1], baseline="mean_std") == [
        0.0,
        0.0,
        0.0,
    ]


def test_fan_out_siblings_count_once():
    # Rollout 0 fanned out into three samples of reward 1; rollout 1 has reward 0: the mean is 1/2, not 3/4.
    result = subtract_baselines([1.0, 1.0, 1.0, 0.0], [0] * 4, [0, 0, 0, 1], baseline="mean")
    assert result == [0.5, 0.5, 0.5, -0.5]


def test_unequal_siblings_of_equal_rollouts_are_not_blown_up():
    result = subtract_baselines([1.0, 0.0, 0.3, 0.7], [0] * 4, [0, 0, 1, 1], baseline="mean_std")
    assert result == pytest.approx([0.5, -0.5, -0.2, 0.2])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=20))
def test_matches_the_textbook_for_ragged_groups(pairs):
    groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    result = subtract_baselines(rewards, groups, range(len(pairs)), baseline="mean_std")
    for i, (group, reward) in enumerate(pairs):
        members = [r for g, r in pairs if g == group]
        expected = 0.0
        if len(members) > 1:
            expected = (reward - statistics.fmean(members)) / (statistics.stdev(members) + 1e-6)
        assert result[i] == pytest.approx(expected, rel=1e-9, abs=1e-9)
