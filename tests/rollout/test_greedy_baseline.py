"""The remax baseline: one greedy answer per group over real HTTP, scored,
kept out of the batch, conserved on failure.
"""

import pytest
import rollout_plugins
from fake_engine import FakeEngine
from rollout_helpers import assert_conserved, counts, make_args, make_source

from slime.rollout.base_types import call_rollout_fn
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import flatten_samples

REMAX = ("--advantage-estimator", "remax")


@pytest.fixture(autouse=True)
def fresh():
    rollout_plugins.calls.clear()
    reset_breaker()


def rollout(args, source):
    return call_rollout_fn(generate_rollout, args, 0, source, evaluation=False)


def greedy_answers(payload, number):
    return {"tokens": [11, 12]} if payload["sampling_params"]["temperature"] == 0 else None


def test_each_group_has_the_reward_of_one_greedy_answer(tmp_path):
    with FakeEngine(greedy_answers) as engine:
        args = make_args(tmp_path, engine, *REMAX)
        source = make_source(args)
        output = rollout(args, source)
        greedy = [r for r in engine.requests if r["sampling_params"]["temperature"] == 0]
    assert [len(group) for group in output.samples] == [2, 2, 2, 2]
    assert len(greedy) == 4 and len(engine.requests) == 12
    for sample in flatten_samples(output.samples):
        assert sample.metadata["greedy_reward"] == 23
        assert sample.response_length == 4 and "greedy_baseline" not in sample.metadata
    assert counts(source) == {"new": 4, "trained": 4}
    assert_conserved(source)


def test_other_estimators_ask_for_no_greedy_answer(tmp_path):
    with FakeEngine(greedy_answers) as engine:
        args = make_args(tmp_path, engine)
        output = rollout(args, make_source(args))
        assert len(engine.requests) == 8
    assert all("greedy_reward" not in s.metadata for s in flatten_samples(output.samples))


def test_a_failed_greedy_answer_is_asked_again(tmp_path):
    failed = []

    def script(payload, number):
        if payload["sampling_params"]["temperature"] == 0 and not failed:
            failed.append(number)
            return "not json"
        return greedy_answers(payload, number)

    with FakeEngine(script) as engine:
        args = make_args(tmp_path, engine, *REMAX)
        source = make_source(args)
        output = rollout(args, source)
    assert failed
    assert all(s.metadata["greedy_reward"] == 23 for s in flatten_samples(output.samples))
    assert_conserved(source)
