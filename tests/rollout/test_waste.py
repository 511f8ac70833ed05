"""What was generated and taught nothing: by cause, in samples, tokens and seconds, in every rollout."""

import pytest
import rollout_plugins
from fake_engine import FakeEngine
from rollout_helpers import make_args, make_source

from slime.observability.rollout_metrics import version_metrics
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.collection.waste import CAUSES, UNITS
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample

EQUAL = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


@pytest.fixture(autouse=True)
def fresh():
    rollout_plugins.calls.clear()
    reset_breaker()


def waste(tmp_path, engine, *flags):
    args = make_args(tmp_path, engine, *flags)
    metrics = call_rollout_fn(generate_rollout, args, 0, make_source(args), evaluation=False).metrics
    return {name.removeprefix("rollout/waste/"): n for name, n in metrics.items() if "/waste/" in name}


def test_a_rollout_that_wastes_nothing_says_so_for_every_cause(tmp_path):
    with FakeEngine() as engine:
        found = waste(tmp_path, engine)
    names = {f"{cause}/{unit}" for cause in CAUSES for unit in UNITS} | {"share"}
    assert found == dict.fromkeys(names, 0)


def hold_late(payload, number):
    return {"hold": True, "tokens": [33, 34]} if number >= 8 else {"delay_s": 0.02, "after": 16}


def test_requests_that_are_ended_count_with_the_tokens_they_had_made(tmp_path):
    with FakeEngine(hold_late) as engine:
        found = waste(tmp_path, engine, "--over-sampling-batch-size", "8")
    assert (found["aborted/samples"], found["aborted/tokens"]) == (8, 16)
    assert found["aborted/seconds"] >= 8 * 0.02
    assert found["share"] == pytest.approx(16 / (16 + 8 * 4))


def test_what_a_partial_rollout_keeps_is_not_wasted(tmp_path):
    with FakeEngine(hold_late) as engine:
        found = waste(tmp_path, engine, "--over-sampling-batch-size", "8", "--partial-rollout")
    assert found["aborted/tokens"] == 0


def alike_for_two_prompts():
    """Script of an engine whose responses to the first two prompts are all the same."""
    prompts = []

    def script(payload, number):
        if payload["input_ids"] not in prompts:
            prompts.append(payload["input_ids"])
        return {"tokens": [40, 41]} if prompts.index(payload["input_ids"]) < 2 else None

    return script


def test_a_filter_and_equal_rewards_are_told_apart(tmp_path):
    with FakeEngine() as engine:
        found = waste(tmp_path, engine, "--dynamic-sampling-filter-path", "rollout_plugins.drop_every_third")
        assert found["filtered/samples"] > 0 and found["zero_variance/samples"] == 0
        assert found["filtered/tokens"] == 4 * found["filtered/samples"] and found["filtered/seconds"] > 0
    with FakeEngine(alike_for_two_prompts()) as engine:
        dropped = waste(tmp_path, engine, "--dynamic-sampling-filter-path", EQUAL)
    assert dropped["filtered/samples"] == 0
    assert (dropped["zero_variance/samples"], dropped["zero_variance/tokens"]) == (4, 8)
    # Groups that replace the dropped ones may be in flight when the batch is full.
    lost = 8 + dropped["aborted/tokens"]
    assert dropped["share"] == pytest.approx(lost / (lost + 8 * 4))
    with FakeEngine(alike_for_two_prompts()) as engine:
        kept = waste(tmp_path, engine)  # nothing drops them: they are trained on, to no effect
    assert (kept["zero_variance/samples"], kept["zero_variance/tokens"]) == (4, 8)
    assert kept["share"] == pytest.approx(8 / (8 + 4 * 4))


def test_groups_without_a_reward_are_wasted_as_failed(tmp_path):
    flags = ("--custom-rm-path", "rollout_plugins.fails_for_odd_groups", "--limits", "reward-retries=0")
    with FakeEngine() as engine:
        found = waste(tmp_path, engine, *flags, "--reward-failure-action", "drop")
    assert found["failed/samples"] >= 4 and found["failed/tokens"] == 4 * found["failed/samples"]


def test_ages_of_tokens_are_a_histogram_against_the_weights_that_are_trained():
    old = Sample(response_length=6, version_spans=[("run:1", 0, 2), ("run:3", 2, 6)])
    new = Sample(response_length=2, version_spans=[("run:4", 0, 2)])
    metrics = version_metrics([old, new], 4)
    ages = {name: value for name, value in metrics.items() if name.startswith("staleness/lag")}
    assert ages == {"staleness/lag_3": 0.25, "staleness/lag_1": 0.5, "staleness/lag_0": 0.25}
    assert metrics["versions_per_sample"] == 1.5
    assert version_metrics([old], 9)["staleness/lag_4_or_more"] == 1.0
