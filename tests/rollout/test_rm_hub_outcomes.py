"""What a reward function returned becomes a plain number or a named failure."""

import numpy as np
import pytest
import torch
from argument_helpers import declared

from slime.rollout.rm_hub.outcomes import RewardConfigError, judge, store
from slime.utils.types import Sample, invalid


def settle_reward(args, sample, value, **options):
    store(sample, judge(args, value, **options))


@pytest.mark.parametrize(
    "value, stored",
    [(1, 1), (0.5, 0.5), (True, 1.0), (np.float32(2), 2.0), (torch.tensor(3.0), 3.0), (np.int64(4), 4)],
)
def test_finite_numbers_are_stored_as_plain_numbers(value, stored):
    sample = Sample(index=0, reward_failure=invalid("before"))
    settle_reward(declared(), sample, value)
    assert sample.reward == stored and type(sample.reward) in (int, float)
    assert sample.reward_failure is None


@pytest.mark.parametrize(
    "value",
    [None, float("nan"), float("inf"), "1.0", [1.0], torch.tensor([1.0, 2.0]), np.float64("nan"), object()],
)
def test_anything_else_is_a_failure_and_never_a_number(value):
    sample = Sample(index=0, reward=1.0)
    settle_reward(declared(), sample, value)
    assert sample.reward is None
    assert sample.reward_failure.kind == "invalid" and "not a finite number" in sample.reward_failure.reason


def test_dict_needs_a_finite_number_at_the_chosen_key():
    args = declared(reward_key="score")
    sample = Sample(index=0)
    settle_reward(args, sample, {"score": torch.tensor(1.0), "pred": "x"})
    assert sample.reward == {"score": 1.0, "pred": "x"}
    settle_reward(args, sample, {"score": float("nan")})
    assert sample.reward is None and "reward['score'] is nan" in sample.reward_failure.reason
    settle_reward(args, sample, {"acc": 1})
    assert "no --reward-key 'score'" in sample.reward_failure.reason


def test_evaluation_reads_its_own_key():
    args = declared(reward_key="score", eval_reward_key="acc")
    sample = Sample(index=0)
    settle_reward(args, sample, {"acc": 1.0}, evaluation=True)
    assert sample.reward == {"acc": 1.0}


def test_dict_without_reward_key_is_a_configuration_error_unless_a_hook_chooses():
    with pytest.raises(RewardConfigError, match="--reward-key"):
        settle_reward(declared(), Sample(index=0), {"score": 1.0})
    sample = Sample(index=0)
    settle_reward(declared(custom_reward_post_process_path="x.y"), sample, {"score": 1.0})
    assert sample.reward == {"score": 1.0}
