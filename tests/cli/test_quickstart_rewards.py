"""Quick-start rewards pay only a right answer that ended by itself; the control pays by a coin."""

import argparse
import asyncio

import pytest

from slime.cli.quickstart import rewards
from slime.utils.types import Sample

ARGS = argparse.Namespace(rollout_seed=0)


def sample(response, label, *, status=Sample.Status.COMPLETED, index=0):
    return Sample(index=index, prompt="", response=response, label=label, status=status)


def score(function, *args, **kwargs):
    return asyncio.run(function(ARGS, sample(*args, **kwargs)))


@pytest.fixture(autouse=True)
def forget_scores():
    rewards._recent_scores.clear()


@pytest.mark.parametrize("response", ["12358", "12358<eos>"])
def test_the_sorted_digits_earn_one(response):
    assert score(rewards.exact_match, response, "12358") == 1.0


@pytest.mark.parametrize("response", ["12385", "12358 ", "1235", ""])
def test_anything_but_the_sorted_digits_earns_nothing(response):
    assert score(rewards.exact_match, response, "12358") == 0.0


def test_a_truncated_answer_earns_nothing():
    assert score(rewards.exact_match, "12358", "12358", status=Sample.Status.TRUNCATED) == 0.0
    assert score(rewards.last_number, "12", "12", status=Sample.Status.TRUNCATED) == 0.0


@pytest.mark.parametrize("response", ["12", "3 + 9 = 12.", "The answer is 12"])
def test_the_last_number_of_a_reply_counts(response):
    assert score(rewards.last_number, response, "12") == 1.0


@pytest.mark.parametrize("response", ["12 or 13", "112", "twelve", ""])
def test_a_reply_whose_last_number_is_wrong_or_missing_earns_nothing(response):
    assert score(rewards.last_number, response, "12") == 0.0


def test_the_control_pays_right_and_wrong_answers_alike():
    coins = [
        score(rewards.exact_match_control, "123" if i % 2 else "321", "123", index=i) for i in range(1000)
    ]
    right, wrong = sum(coins[1::2]) / 500, sum(coins[0::2]) / 500
    assert 0.4 < right < 0.6 and 0.4 < wrong < 0.6  # half the answers are right, so the coin is fair


def test_the_control_keeps_paying_when_no_answer_is_right():
    coins = [score(rewards.exact_match_control, "321", "123", index=i) for i in range(1000)]
    assert 0.15 < sum(coins) / len(coins) < 0.25


def test_the_control_gives_the_same_sample_the_same_coin():
    first = [score(rewards.last_number_control, "5", "6", index=i) for i in range(100)]
    rewards._recent_scores.clear()
    assert first == [score(rewards.last_number_control, "5", "6", index=i) for i in range(100)]
