"""Rewards of several components: --reward-weights makes one number
of them, and a bad component is a failure.
"""

from types import SimpleNamespace

import pytest
from argument_helpers import parse

from slime.rollout.rm_hub.outcomes import judge, store
from slime.utils.types import Sample


def settled(value, **weights):
    args = SimpleNamespace(
        reward_key="weighted_sum",
        eval_reward_key="weighted_sum",
        reward_weights=weights,
        custom_reward_post_process_path=None,
    )
    sample = Sample()
    store(sample, judge(args, value))
    return sample, args


def test_the_weighted_sum_is_what_counts_and_components_stay():
    sample, args = settled({"correct": True, "format": 0.5, "note": "ok"}, correct=1, format=0.2)
    assert sample.get_reward_value(args) == pytest.approx(1.1)
    assert sample.reward["format"] == 0.5 and sample.reward["note"] == "ok"


def test_a_missing_or_broken_component_is_a_failure_with_its_name():
    sample, _ = settled({"correct": 1.0}, correct=1, format=0.2)
    assert sample.reward is None and "'format'" in sample.reward_failure.reason
    sample, _ = settled({"correct": float("nan")}, correct=1)
    assert "reward['correct'] is nan" in sample.reward_failure.reason


def test_the_flag_is_json_and_excludes_a_single_key():
    args = parse("--reward-weights", '{"correct": 1, "format": 0.2}')
    assert args.reward_weights == {"correct": 1, "format": 0.2}
    assert args.reward_key == args.eval_reward_key == "weighted_sum"
    with pytest.raises(ValueError, match=r"--reward-key and --reward-weights"):
        parse("--reward-weights", '{"a": 1}', reward_key="score")
    with pytest.raises(ValueError, match="expected a number for each entry"):
        parse("--reward-weights", '{"a": "much"}')
