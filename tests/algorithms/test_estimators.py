"""Every estimator from raw rewards to advantages, against loops: ragged
groups, fan-out, empty masks, float64 and fp32.
"""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import close

from slime.algorithms.advantages import AdvantageInputs, compute_advantages
from slime.algorithms.reward_shaping import combine_rewards, overlong_penalty, subtract_baselines
from slime.catalog.estimators import ESTIMATORS


def group_of(rewards, groups, rollouts, lengths, i):
    """The rollouts of sample i's group as (id, mean reward, total length) in plain loops."""
    found = []
    for rollout in dict.fromkeys(r for r, g in zip(rollouts, groups, strict=True) if g == groups[i]):
        own = [j for j in range(len(rewards)) if rollouts[j] == rollout and groups[j] == groups[i]]
        found.append((rollout, sum(rewards[j] for j in own) / len(own), sum(lengths[j] for j in own)))
    return found


def expected_reward(name, rewards, groups, rollouts, lengths, greedy, i):
    members = group_of(rewards, groups, rollouts, lengths, i)
    values = [value for _, value, _ in members]
    if name == "greedy":
        return rewards[i] - greedy[i]
    if len(members) == 1:
        return 0.0
    mean = sum(values) / len(values)
    if name == "leave_one_out":
        others = [value for rollout, value, _ in members if rollout != rollouts[i]]
        return rewards[i] - sum(others) / len(others)
    if name == "length_weighted":
        weight = sum(length for _, _, length in members)
        base = sum(value * length for _, value, length in members) / weight if weight else mean
        return rewards[i] - base
    if name == "mean_std":
        equal = max(values) - min(values) <= 1e-12
        return (rewards[i] - mean) / (1.0 if equal else statistics.stdev(values) + 1e-6)
    if name == "success_rate":
        return (rewards[i] - mean) / mean if mean else 0.0
    return rewards[i] - mean


samples = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(0, 4), st.integers(0, 5)),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize(
    "name", ["mean", "mean_std", "leave_one_out", "length_weighted", "success_rate", "greedy"]
)
@settings(max_examples=25, deadline=None)
@given(rows=samples)
def test_baselines_match_the_loop_for_any_groups_and_fan_out(name, rows):
    groups = [g for g, _, _, _ in rows]
    rollouts = [10 * g + r for g, r, _, _ in rows]  # samples of one rollout are siblings
    rewards = [round(x, 3) for _, _, x, _ in rows]
    lengths = [float(n) for _, _, _, n in rows]
    greedy = [0.5 + g for g in groups]
    got = subtract_baselines(rewards, groups, rollouts, baseline=name, lengths=lengths, greedy_rewards=greedy)
    for i, value in enumerate(got):
        expected = expected_reward(name, rewards, groups, rollouts, lengths, greedy, i)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_maxrl_refuses_negative_rewards_and_ignores_groups_without_success():
    assert subtract_baselines([0.0, 0.0], [0, 0], [0, 1], baseline="success_rate") == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"a reward of -1.0: --advantage-estimator maxrl"):
        subtract_baselines([-1.0, 0.0], [0, 0], [0, 1], baseline="success_rate")


def test_remax_without_a_greedy_answer_says_where_it_comes_from():
    with pytest.raises(ValueError, match="greedy_reward"):
        subtract_baselines([1.0], [0], [0], baseline="greedy", greedy_rewards=[None])


def test_remax_needs_no_second_sample():
    assert subtract_baselines([1.0], [0], [0], baseline="greedy", greedy_rewards=[0.25]) == [0.75]


def loop_advantages(name, reward, kl, mask, values, kl_coef, gamma, lambd):
    """Advantages of one sample, one token at a time."""
    n = len(kl)
    trained = [t for t in range(n) if mask[t]]
    if name == "reinforce_plus_plus":
        result, following = [0.0] * n, 0.0
        for t in reversed(trained):
            following = -kl_coef * kl[t] + (reward if t == trained[-1] else 0.0) + gamma * following
            result[t] = following
        return result
    if name == "reinforce_plus_plus_baseline":
        return [reward - kl_coef * k for k in kl]
    if name != "ppo":
        return [reward] * n
    result, following, next_value = [0.0] * n, 0.0, 0.0
    for t in reversed(trained):
        token_reward = -kl_coef * kl[t] + (reward if t == trained[-1] else 0.0)
        following = token_reward + gamma * next_value - values[t] + gamma * lambd * following
        next_value = values[t]
        result[t] = following
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_advantages_match_the_loop(name, dtype, lengths, seed):
    g = torch.Generator().manual_seed(seed)
    kl, values = (
        [torch.randn(n, generator=g, dtype=torch.float64).to(dtype) for n in lengths] for _ in range(2)
    )
    masks = [torch.randint(0, 2, (n,), generator=g) for n in lengths]
    rewards = torch.randn(len(lengths), generator=g, dtype=torch.float64).tolist()
    data = AdvantageInputs(rewards, kl, masks, kl_coef=0.1, gamma=0.9, lambd=0.8, values=values)
    advantages, returns = compute_advantages(name, data)
    for i in range(len(lengths)):
        plain = [kl[i].tolist(), masks[i].tolist(), values[i].tolist()]
        expected = loop_advantages(name, rewards[i], *plain, 0.1, 0.9, 0.8)
        close(advantages[i], torch.tensor(expected, dtype=torch.float64), dtype)
        base = values[i] * masks[i] if name == "ppo" else torch.zeros_like(values[i])
        close(returns[i], (advantages[i] + base).double(), dtype)


def test_a_sample_without_trained_tokens_gets_no_ppo_advantage():
    data = AdvantageInputs(
        [5.0], [torch.zeros(2)], [torch.zeros(2)], values=[torch.ones(2)], gamma=1.0, lambd=1.0
    )
    advantages, returns = compute_advantages("ppo", data)
    assert advantages[0].tolist() == returns[0].tolist() == [0, 0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_rank_without_samples_gets_no_advantages(name):
    assert compute_advantages(name, AdvantageInputs([], [], [], values=[])) == ([], [])


def test_components_are_summed_by_weight():
    assert combine_rewards({"correct": 1.0, "format": 0.5, "note": 7.0}, {"correct": 1, "format": 0.2}) == 1.1
    with pytest.raises(ValueError, match="no component 'format'"):
        combine_rewards({"correct": 1.0}, {"correct": 1, "format": 0.2})


def test_overlong_penalty_grows_over_the_buffer():
    lengths = [0, 80, 90, 100, 120]
    assert [overlong_penalty(n, 100, 20) for n in lengths] == [0, 0, -0.5, -1, -1]
