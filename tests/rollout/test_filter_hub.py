"""Dynamic sampling filters: which groups are kept, how drops are named and counted."""

from types import SimpleNamespace

import numpy as np
import pytest

from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.utils.types import Sample, invalid

ARGS = SimpleNamespace(reward_key=None)


def group(*rewards):
    return [Sample(index=i, reward=r) for i, r in enumerate(rewards)]


def test_group_of_equal_rewards_is_dropped_with_the_reward_in_the_reason():
    output = check_reward_nonzero_std(ARGS, group(1.0, 1.0, 1.0))
    assert (output.keep, output.reason, output.keep_when_insufficient) == (False, "zero_std_1.0", False)


def test_group_with_different_rewards_is_kept():
    assert check_reward_nonzero_std(ARGS, group(1.0, 0.0)).keep


def test_tiny_differences_around_a_large_reward_survive_in_float64():
    # In float32 100.0 and 100.000004 are the same number.
    assert check_reward_nonzero_std(ARGS, group(100.0, 100.000004)).keep


def test_rewards_are_read_by_reward_key():
    args = SimpleNamespace(reward_key="score")
    samples = group({"score": 1.0, "acc": 0}, {"score": 1.0, "acc": 1})
    assert check_reward_nonzero_std(args, samples).reason == "zero_std_1.0"


def test_fan_out_lists_inside_a_group_are_flattened():
    nested = [group(1.0, 1.0), group(0.0)]
    assert check_reward_nonzero_std(ARGS, nested).keep


def test_failed_samples_have_no_say_and_do_not_count_as_zero():
    samples = group(1.0, 1.0, None)
    samples[2].reward_failure = invalid("timeout")
    assert check_reward_nonzero_std(ARGS, samples).reason == "zero_std_1.0"
    for sample in samples:
        sample.reward, sample.reward_failure = None, invalid("timeout")
    output = check_reward_nonzero_std_with_fallback(ARGS, samples)
    assert (output.reason, output.keep_when_insufficient) == ("no_scored_sample", False)


def test_unscored_sample_is_an_error_naming_it():
    with pytest.raises(ValueError, match=r"\[1\]"):
        check_reward_nonzero_std(ARGS, group(1.0, None))


def test_fallback_keeps_an_equal_group_only_when_the_batch_would_come_up_short():
    output = check_reward_nonzero_std_with_fallback(ARGS, group(0, 0))
    assert not output.keep
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=9, target_data_size=8)
    assert not should_drop_dynamic_filter_output(output, remaining_batch_size=8, target_data_size=8)


def test_plain_drop_ignores_how_many_groups_remain():
    output = DynamicFilterOutput(keep=False)
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=1, target_data_size=8)
    assert not should_drop_dynamic_filter_output(
        DynamicFilterOutput(keep=True), remaining_batch_size=99, target_data_size=8
    )


def test_bool_answers_are_wrapped_and_none_is_refused():
    assert call_dynamic_filter(None, ARGS, []).keep
    assert not call_dynamic_filter(lambda args, samples: False, ARGS, []).keep
    with pytest.raises(ValueError, match="returned None"):
        call_dynamic_filter(lambda args, samples: None, ARGS, [])


async def keeps_later(args, samples):
    return False


@pytest.mark.parametrize("answer", ["drop", (False, "too easy"), {"keep": False}], ids=str)
def test_an_answer_that_is_no_yes_or_no_is_not_taken_for_yes(answer):
    with pytest.raises(ValueError, match="return DynamicFilterOutput"):
        call_dynamic_filter(lambda args, samples: answer, ARGS, [])
    assert not call_dynamic_filter(lambda args, samples: np.bool_(False), ARGS, []).keep


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_filter_that_is_a_coroutine_is_not_taken_for_yes():
    with pytest.raises(ValueError, match="keeps_later returned <coroutine"):
        call_dynamic_filter(keeps_later, ARGS, [])


def test_drops_are_counted_by_reason():
    gatherer = MetricGatherer()
    for reason in ("zero_std_0", "zero_std_0", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {
        "rollout/dynamic_filter/drop_zero_std_0": 2,
        "rollout/dynamic_filter/drop_unspecified": 1,
    }
