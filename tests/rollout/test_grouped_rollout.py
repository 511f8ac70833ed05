"""Samples of a group that travel as one request are what each would be by itself."""

import asyncio
import time

import pytest
from fake_engine import FakeEngine
from rollout_helpers import assert_conserved, counts, make_args, make_source

from slime.rollout import sglang_rollout
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.generation.state import Limit
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.utils.async_utils import run
from slime.utils.types import flatten_samples
from slime.wire.grouped import GroupedRequests


@pytest.fixture(autouse=True)
def fresh():
    reset_breaker()


def make_rollout(tmp_path, script=None, *flags):
    with FakeEngine(script) as engine:
        args = make_args(tmp_path, engine, *flags)
        source = make_source(args)
        output = call_rollout_fn(sglang_rollout.generate_rollout, args, 0, source, evaluation=False)
    assert_conserved(source)
    return engine, source, flatten_samples(output.samples)


def facts(sample):
    """All of a sample but names that are drawn at random, and when it was worked on."""
    data = sample.to_dict()
    del data["session_id"]
    spans = data.pop("trace")["spans"]
    return data, [(span["name"], span["about"]) for span in spans]


NO_LOG_PROBS = {"meta": {"output_token_logprobs": None}}
NO_NUMBER = {"meta": {"spec_verify_ct": "many"}}  # found when most of the answer is in the sample


@pytest.mark.parametrize("fault", [None, 500, {"break": True}, {"tokens": [10**6]}, NO_LOG_PROBS, NO_NUMBER])
def test_they_are_those_of_single_requests_also_where_one_fails_at_first(tmp_path, monkeypatch, fault):
    def script(payload, number):
        return fault if number == 3 else None

    engine, source, together = make_rollout(tmp_path, script)
    assert max(engine.group_sizes) == 2
    monkeypatch.setattr(GroupedRequests, "accepts", lambda *_: False)
    _, other_source, alone = make_rollout(tmp_path, script)
    assert [facts(s)[0] for s in together] == [facts(s)[0] for s in alone]
    if fault is None:
        assert [facts(s) for s in together] == [facts(s) for s in alone]
    assert counts(source) == counts(other_source) == {"new": 4, "trained": 4}


def test_a_group_of_more_than_one_request_is_at_the_engines_as_a_whole(tmp_path):
    asked, patience = [], time.monotonic() + 60

    def script(payload, number):
        asked.append(number)
        return {"until": lambda: len(asked) == 150 or time.monotonic() > patience}

    flags = ("--rollout-batch-size", "1", "--n-samples-per-prompt", "150")
    flags += ("--sglang-server-concurrency", "600")
    engine, source, samples = make_rollout(tmp_path, script, *flags)
    assert sorted(engine.group_sizes) == [22, 64, 64] and engine.most_running == 150
    assert [sample.index for sample in samples] == list(range(150))
    assert counts(source) == {"new": 1, "trained": 1}


def test_slots_are_taken_all_or_none_and_two_groups_never_wait_for_each_other():
    async def scene():
        limit, order = Limit(4), []

        async def group(name):
            await limit.enter(3)
            order.append(name)
            await asyncio.sleep(0)
            for _ in range(3):
                limit.leave()

        tasks = [asyncio.ensure_future(group(name)) for name in "abcd"]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order, limit.in_use

    assert run(scene(), timeout_s=60) == (["a", "b", "d"], 0)
