"""--turn-discount against a slow, obvious version in float64: each token by a sum over later turns."""

import math
import random

import pytest
import torch
from rollout_helpers import make_args

from slime.algorithms.advantages import AdvantageInputs, compute_advantages
from slime.algorithms.turn_credit import compared_returns, on_last_tokens, turn_returns, whole_turns
from slime.batch.convert import samples_to_batch
from slime.utils.types import Sample


def episodes(seed, groups=3, each=4):
    """Samples of unequal numbers of turns, with text of others between them."""
    draw = random.Random(seed)
    samples = []
    for index in range(groups * each):
        sample = Sample(group_index=index // each, index=index, tokens=[1, 2], status=Sample.Status.COMPLETED)
        turns = []
        for turn in range(draw.randint(1, 5)):
            if turn:
                sample.append_response_tokens(tokens=[3] * draw.randint(1, 3), trainable=False)
            start = sample.response_length
            count = draw.randint(1, 4)
            sample.append_response_tokens(tokens=[4] * count, log_probs=[-0.5] * count)
            turns.append((start, sample.response_length, draw.uniform(-1, 2)))
        sample.turn_rewards = turns
        sample.reward = sum(reward for _, _, reward in turns)
        samples.append(sample)
    return samples


def slow_values(samples, discount, *, scaled):
    """Token by token: the discounted sum from its turn on, less the mean of that turn over the group."""

    def to_go(sample, k):
        rewards = [reward for _, _, reward in sample.turn_rewards]
        k = min(k, len(rewards) - 1)
        return sum(discount ** (j - k) * rewards[j] for j in range(k, len(rewards)))

    result = []
    for sample in samples:
        group = [other for other in samples if other.group_index == sample.group_index]
        tokens = [0.0] * sample.response_length
        for k, (start, end, _) in enumerate(sample.turn_rewards):
            returns = [to_go(other, k) for other in group]
            mean = sum(returns) / len(returns)
            std = math.sqrt(sum((r - mean) ** 2 for r in returns) / (len(returns) - 1))
            for position in range(start, end):
                tokens[position] = (to_go(sample, k) - mean) / ((std + 1e-6) if scaled else 1.0)
        result.append(tokens)
    return result


def advantages(args, batch):
    inputs = AdvantageInputs(
        rewards=batch["rewards"],
        kl=[torch.zeros(length) for length in batch["response_lengths"]],
        loss_masks=batch["loss_masks"],
        gamma=args.gamma,
        token_rewards=batch.get("token_rewards"),
    )
    return compute_advantages(args.advantage_estimator, inputs)[0]


@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("estimator, scaled", [("grpo", True), ("dr_grpo", False)])
def test_a_token_gets_the_return_of_its_turn_less_that_of_the_group(tmp_path, discount, estimator, scaled):
    args = make_args(tmp_path, None, "--turn-discount", str(discount), "--advantage-estimator", estimator)
    samples = episodes(seed=int(discount * 10))
    made = advantages(args, samples_to_batch(args, samples))
    for fast, slow in zip(made, slow_values(samples, discount, scaled=scaled), strict=True):
        assert fast.double().tolist() == pytest.approx(slow, abs=2e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo"])
def test_where_only_the_end_is_rewarded_turns_get_what_the_whole_gets(tmp_path, estimator):
    flags = ("--advantage-estimator", estimator)
    samples = episodes(seed=5)
    for sample in samples:
        sample.turn_rewards = [(start, end, 0.0) for start, end, _ in sample.turn_rewards]
    plain = make_args(tmp_path, None, *flags)
    by_turn = make_args(tmp_path, None, *flags, "--turn-discount", "1")
    expected = advantages(plain, samples_to_batch(plain, samples))
    batch = samples_to_batch(by_turn, samples)
    for one, other, mask in zip(expected, advantages(by_turn, batch), batch["loss_masks"], strict=True):
        torch.testing.assert_close(one * mask, other, atol=1e-6, rtol=1e-6)


def test_estimators_that_discount_by_token_find_each_reward_on_the_last_token_of_its_turn(tmp_path):
    flags = ("--advantage-estimator", "reinforce_plus_plus", "--gamma", "0.9", "--turn-discount", "1")
    flags += ("--normalize-advantages",)  # a step later: what is made here is before it
    args = make_args(tmp_path, None, *flags)
    samples = episodes(seed=6)
    made = advantages(args, samples_to_batch(args, samples))
    for sample, fast in zip(samples, made, strict=True):
        trained = [p for p, m in enumerate(sample.loss_mask) if m]
        last_of_turn = {end - 1: reward for _, end, reward in sample.turn_rewards}
        rewards = [last_of_turn.get(p, 0.0) for p in trained]
        for place, position in enumerate(trained):
            slow = sum(0.9 ** (j - place) * rewards[j] for j in range(place, len(rewards)))
            assert float(fast[position]) == pytest.approx(slow, abs=2e-6)


def test_without_the_flag_nothing_changes_and_another_reward_counts_on_the_last_turn(tmp_path):
    args = make_args(tmp_path)
    assert "token_rewards" not in samples_to_batch(args, episodes(seed=7))
    assert whole_turns([(0, 2, 1.0), (3, 5, 1.0)], 5, reward=5.0) == [(0, 2, 1.0), (3, 5, 4.0)]
    assert whole_turns(None, 5, reward=2.0) == [(0, 5, 2.0)]
    assert turn_returns([0, 1, 4], 0.5) == [1.5, 3, 4]


def test_turns_that_miss_a_trained_token_are_refused(tmp_path):
    args = make_args(tmp_path, None, "--turn-discount", "1")
    samples = episodes(seed=8)
    start, end, reward = samples[3].turn_rewards[0]
    samples[3].turn_rewards[0] = (start, end - 1, reward)
    with pytest.raises(ValueError, match="each trained token must be in one turn"):
        samples_to_batch(args, samples)


def test_a_reward_of_a_turn_that_trains_nothing_is_not_lost():
    mask = torch.tensor([0, 0, 1, 1, 0, 0])
    assert on_last_tokens([(0, 2, 1.0), (2, 4, 2.0), (5, 6, 4.0)], mask).tolist() == [0, 0, 1.0, 6.0, 0, 0]
    assert compared_returns([[(0, 1, 1.0)], [(0, 1, 3.0)]], 1.0, lambda r: [x - 2 for x in r]) == [[-1], [1]]
