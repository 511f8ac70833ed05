"""Metric arithmetic on small hand-checked batches."""

import itertools

import pytest
from argument_helpers import declared

from slime.catalog.metrics import is_eval_score
from slime.observability.rollout_metrics import (
    eval_metrics,
    has_repetition,
    pass_at_k,
    pass_rates,
    rollout_metrics,
    sample_metrics,
    version_metrics,
)
from slime.observability.tracer import trace_span
from slime.utils.types import PrefixCacheInfo, Sample, SpecInfo, invalid


def make_args(**changes):
    return declared(**{"rollout_num_gpus": 2, **changes})


def sample(group, reward, length=10, **fields):
    return Sample(group_index=group, reward=reward, response_length=length, **fields)


@pytest.mark.parametrize("n, c, k", [(4, 0, 2), (4, 1, 1), (4, 1, 2), (5, 2, 3), (6, 3, 4), (3, 3, 3)])
def test_pass_at_k_equals_counting_all_subsets(n, c, k):
    outcomes = [1] * c + [0] * (n - c)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_rates_double_k_up_to_the_smallest_group_and_count_only_reward_one():
    rates = pass_rates([[1, 0, 0.5, 0], [1.0, 1, 1, 1, 1]])
    assert rates == {"pass@1": pytest.approx((0.25 + 1) / 2), "pass@2": pytest.approx(0.75), "pass@4": 1.0}
    assert pass_rates([]) == {}


def test_rollout_metrics_of_a_hand_checked_batch():
    batch = [
        [sample(0, 1.0, 10), sample(0, 1.0, 20, status=Sample.Status.TRUNCATED)],
        [sample(1, 0.0, 30, loss_mask=[1] * 5 + [0] * 25), [sample(1, 1.0, 40)]],
        [sample(2, 0.0, 10), sample(2, 0.0, 10)],
    ]
    metrics = rollout_metrics(make_args(), batch, rollout_time=2.0)
    assert metrics["rollout/response_len/mean"] == pytest.approx((10 + 20 + 5 + 40 + 10 + 10) / 6)
    assert metrics["rollout/response_len/median"] == 10
    assert (metrics["rollout/response_len/max"], metrics["rollout/response_len/min"]) == (40, 5)
    assert metrics["rollout/truncated_ratio"] == pytest.approx(1 / 6)
    assert metrics["rollout/raw_reward"] == pytest.approx(0.5)
    assert metrics["rollout/zero_std/count_1.0"] == 1 and metrics["rollout/zero_std/count_0.0"] == 1
    assert metrics["perf/rollout_time"] == 2.0
    assert metrics["perf/tokens_per_gpu_per_sec"] == pytest.approx(120 / 2 / 2)
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == pytest.approx(95 / 2 / 2)
    assert metrics["perf/longest_sample_tokens_per_sec"] == 20
    assert "rollout/weight_version/min" not in metrics and "passrate/pass@1" not in metrics


def test_ppo_reports_no_zero_std_and_passrate_is_on_request():
    metrics = rollout_metrics(
        make_args(advantage_estimator="ppo", log_passrate=True), [sample(0, 1), sample(0, 0)], 1
    )
    assert not any("zero_std" in key for key in metrics)
    assert (metrics["passrate/pass@1"], metrics["passrate/pass@2"]) == (0.5, 1.0)


def test_failed_rewards_are_counted_and_left_out_of_the_mean():
    batch = [sample(0, 1.0), sample(0, None, reward_failure=invalid("nan"))]
    metrics = rollout_metrics(make_args(), batch, 1.0)
    assert metrics["rollout/raw_reward"] == 1.0 and metrics["rollout/reward_failure/invalid"] == 1


def test_dict_rewards_are_read_by_key_and_counted_by_category():
    batch = [sample(0, {"score": 1.0, "cat": "ok"}), sample(0, {"score": 0.0, "cat": "format"})]
    metrics = rollout_metrics(make_args(reward_key="score", log_reward_category="cat"), batch, 1.0)
    assert metrics["rollout/raw_reward"] == 0.5 and metrics["rollout/error_cat/format"] == 0.5


def test_empty_rollout_has_only_its_time():
    assert rollout_metrics(make_args(), [], 1.0) == {"perf/rollout_time": 1.0}


def test_repetition_is_a_loop_not_a_long_text():
    assert has_repetition("abc " * 3000)
    assert not has_repetition("".join(f"{i * 7919 % 10007} " for i in range(2000)))
    assert not has_repetition("")


def test_version_metrics_weigh_staleness_by_tokens():
    batch = [
        sample(0, 1.0, version_spans=[("run:3", 0, 6), ("run:4", 6, 8)]),
        sample(0, 1.0, version_spans=[("run:4", 0, 8)]),
    ]
    metrics = version_metrics(batch, "run:5")
    assert (metrics["weight_version/min"], metrics["weight_version/max"]) == (3, 4)
    assert metrics["staleness/mean"] == pytest.approx((2 * 6 + 1 * 2 + 1 * 8) / 16)
    assert metrics["staleness/max"] == 2 and metrics["mixed_version_frac"] == 0.5
    assert "staleness/max" not in version_metrics(batch, None)
    assert version_metrics([sample(0, 1.0, weight_versions=["default"])], 3) == {}


def test_engine_counters_are_ratios_of_sums():
    batch = [
        sample(0, 1.0, spec_info=SpecInfo(3, 4, 2, 6), prefix_cache_info=PrefixCacheInfo(10, 20)),
        sample(0, 1.0, spec_info=SpecInfo(1, 4, 2, 2), prefix_cache_info=PrefixCacheInfo(0, 20)),
    ]
    metrics = sample_metrics(batch)
    assert (metrics["spec_accept_rate"], metrics["spec_accept_length"]) == (0.5, 2.0)
    assert (metrics["prefix_cache_hit_rate"], metrics["avg_cached_tokens_per_sample"]) == (0.25, 5.0)


def test_request_latencies_come_from_the_traces():
    one = sample(0, 1.0)
    with trace_span(one, "sglang_generate") as span:
        span.update({"e2e_latency": 0.5, "queue_time": 0.1})
    metrics = rollout_metrics(make_args(), [one, sample(0, 0.0)], 1.0)
    assert metrics["perf/request/e2e_latency/mean"] == 0.5 and metrics["perf/request/queue_time/max"] == 0.1


def test_eval_metrics_per_dataset():
    samples = [sample(g, None, 4) for g in (0, 0, 1, 1)]
    data = {"aime": {"rewards": [1, 0, 1, 1], "truncated": [True, False, False, False], "samples": samples}}
    metrics = eval_metrics(make_args(log_passrate=True), data)
    assert metrics["eval/aime"] == 0.75 and metrics["eval/aime-truncated_ratio"] == 0.25
    assert (metrics["eval/aime-pass@1"], metrics["eval/aime-pass@2"]) == (0.75, 1.0)
    assert metrics["eval/aime/response_len/mean"] == 4


def test_eval_reward_that_failed_is_counted_not_averaged():
    metrics = eval_metrics(make_args(), {"d": {"rewards": [1.0, None], "samples": []}})
    assert metrics == {"eval/d": 1.0, "eval/d-failed": 1, "eval/d-samples": 1}


def test_groups_of_one_rollout_are_counted_and_siblings_are_one():
    alone = [sample(0, 1.0), sample(1, 1.0, rollout_id=4), sample(1, 0.0, rollout_id=4)]
    pair = [sample(2, 1.0), sample(2, 0.0)]
    assert rollout_metrics(make_args(), alone + pair, 1.0)["rollout/groups/of_one"] == 2
    assert "rollout/groups/of_one" not in rollout_metrics(make_args(), pair, 1.0)


def test_components_of_dict_rewards_are_averaged():
    samples = [sample(0, {"all": 1.0, "format": 0.5, "why": "x"}), sample(0, {"all": 0.0, "format": 1.0})]
    metrics = rollout_metrics(make_args(reward_key="all"), samples, 1.0)
    assert metrics["rollout/reward/format"] == 0.75
    assert "rollout/reward/why" not in metrics


def test_turns_are_stretches_that_the_policy_wrote():
    samples = [sample(0, 1.0, 6), sample(0, 0.0, 4)]
    samples[0].loss_mask = [1, 1, 0, 0, 1, 0]
    metrics = rollout_metrics(make_args(log_multi_turn=True), samples, 1.0)
    assert metrics["multi_turn/raw_response_length/mean"] == 5
    assert metrics["multi_turn/observation_length/max"] == 3
    assert metrics["multi_turn/round_number/mean"] == 1.5


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("eval/math", True),
        ("eval/aime-2024", True),
        ("eval/held-out", True),
        ("eval/aime-2024-truncated_ratio", False),
        ("eval/math-failed", False),
        ("eval/math-pass@4", False),
        ("eval/math/response_len/mean", False),
        ("eval/step", False),
        ("rollout/raw_reward", False),
    ],
)
def test_the_score_of_an_evaluation_is_known_by_its_name(name, is_one):
    assert is_eval_score(name) == is_one
