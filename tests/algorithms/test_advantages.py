"""Estimators, GAE and whitening against loops over tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    get_reinforce_plus_plus_returns,
    masked_moments,
    whiten,
)
from slime.algorithms.gae import (
    chunked_discounted_returns,
    chunked_gae,
    get_advantages_and_returns_batch,
    vanilla_gae,
)

ragged = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def inputs(lengths, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return AdvantageInputs(
        rewards=torch.randn(len(lengths), generator=generator).tolist(),
        kl=[torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths],
        loss_masks=[torch.randint(0, 2, (n,), generator=generator) for n in lengths],
        **options,
    )


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_group_relative_estimators_put_the_reward_on_every_token(name):
    data = inputs([3, 1], kl_coef=0.5)
    advantages, returns = compute_advantages(name, data)
    for i, reward in enumerate(data.rewards):
        assert advantages[i].tolist() == returns[i].tolist() == pytest.approx([reward] * len(data.kl[i]))


@settings(max_examples=40, deadline=None)
@given(ragged, st.integers(0, 1000), st.sampled_from([1.0, 0.9]))
def test_reinforce_plus_plus_discounts_over_trained_tokens_only(lengths, seed, gamma):
    data = inputs(lengths, seed)
    got = get_reinforce_plus_plus_returns(data.rewards, data.kl, data.loss_masks, kl_coef=0.1, gamma=gamma)
    for reward, kl, mask, returns in zip(data.rewards, data.kl, data.loss_masks, got, strict=True):
        trained = [t for t, m in enumerate(mask) if m]
        expected = [0.0] * len(kl)
        for i, t in enumerate(trained):
            for j, u in enumerate(trained[i:]):
                expected[t] += gamma**j * (-0.1 * float(kl[u]) + (reward if u == trained[-1] else 0.0))
        assert returns.tolist() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ppo"])
def test_a_tool_answer_of_any_length_discounts_nothing(name):
    """Two actions, then what a tool wrote, then the last action: the same
    with 1 and with 50 tokens of the tool's.
    """
    seen = []
    for tool in (0, 1, 50):
        mask = torch.tensor([1, 1, *[0] * tool, 1])
        zeros = torch.zeros(len(mask), dtype=torch.float64)
        data = AdvantageInputs(
            rewards=[2.0], kl=[zeros], loss_masks=[mask], gamma=0.5, lambd=1.0, values=[zeros]
        )
        advantages, returns = compute_advantages(name, data)
        assert not advantages[0][mask == 0].any()
        seen.append((advantages[0][mask == 1].tolist(), returns[0][mask == 1].tolist()))
    assert seen == [([0.5, 1.0, 2.0], [0.5, 1.0, 2.0])] * 3


def test_reinforce_plus_plus_baseline_subtracts_the_kl_per_token():
    data = inputs([2], kl_coef=0.5)
    advantages, _ = compute_advantages("reinforce_plus_plus_baseline", data)
    assert advantages[0].tolist() == pytest.approx([data.rewards[0] - 0.5 * k for k in data.kl[0].tolist()])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 16), st.sampled_from([1.0, 0.95]), st.sampled_from([1.0, 0.8]))
def test_chunked_gae_equals_the_recursion(length, chunk, gamma, lambd):
    torch.manual_seed(length)
    rewards, values = torch.randn(2, 3, length, dtype=torch.float64)
    expected = vanilla_gae(rewards, values, gamma, lambd)
    torch.testing.assert_close(
        chunked_gae(rewards, values, gamma, lambd, chunk), expected, rtol=1e-10, atol=1e-10
    )
    no_values = torch.zeros_like(values)
    returns, _ = vanilla_gae(rewards, no_values, gamma, 1.0)
    torch.testing.assert_close(
        chunked_discounted_returns(rewards, gamma, chunk), returns, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("chunked", [True, False])
def test_gae_of_a_ragged_batch_is_gae_of_each_response(chunked):
    lengths = [3, 1, 5]
    rewards = [torch.randn(n, dtype=torch.float64) for n in lengths]
    values = [torch.randn(n, dtype=torch.float64) for n in lengths]
    advantages, returns = get_advantages_and_returns_batch(
        lengths, lengths, values, rewards, 0.9, 0.8, chunked
    )
    for i in range(3):
        expected = vanilla_gae(rewards[i][None], values[i][None], 0.9, 0.8)
        torch.testing.assert_close((advantages[i], returns[i]), (expected[0][0], expected[1][0]))


def test_ppo_puts_the_reward_on_the_last_token():
    values = [torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64)]
    data = AdvantageInputs(
        rewards=[2.0],
        kl=[torch.zeros(3, dtype=torch.float64)],
        loss_masks=[torch.ones(3)],
        gamma=0.5,
        values=values,
    )
    advantages, _ = compute_advantages("ppo", data)
    assert advantages[0].tolist() == [0.5, 1.0, 2.0]


def test_whitening_over_shards_equals_whitening_over_the_whole():
    values = [torch.randn(n, dtype=torch.float64) * 3 + 1 for n in (4, 2, 5)]
    masks = [torch.ones(4), torch.zeros(2), torch.tensor([1, 1, 0, 1, 1])]
    moments = masked_moments(values[:1], masks[:1]) + masked_moments(values[1:], masks[1:])
    white = whiten(values, moments)
    kept = torch.cat([w[m.bool()] for w, m in zip(white, masks, strict=True)])
    assert kept.mean().item() == pytest.approx(0, abs=1e-9)
    assert kept.var().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("lengths", [(), (3,), (2, 5)])
def test_whitening_where_no_token_trains_leaves_nothing_and_does_not_raise(lengths):
    values = [torch.randn(n) for n in lengths]
    masks = [torch.zeros(n) for n in lengths]
    white = whiten(values, masked_moments(values, masks))
    assert [w.tolist() for w in white] == [[0.0] * n for n in lengths]
