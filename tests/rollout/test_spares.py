"""Spare samples of a prompt: the first that end are its group, and the others end at the engine too."""

import pytest
import sessions_under_test as episodes
from fake_engine import FakeEngine, names, sample_index
from rollout_helpers import assert_conserved, make_args, make_source

from slime.rollout.generation import turn_gate
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample, flatten_samples

EOS = 2  # <|im_end|> of the tiny tokenizer


@pytest.fixture(autouse=True)
def fresh():
    episodes.made.clear()
    yield
    turn_gate.forget_all()


def ends(payload):
    return {"tokens": [20, 21, EOS], "meta": {"finish_reason": {"type": "stop", "matched": EOS}}}


def hold(is_held, held):
    """A script that holds the requests `is_held` says, until they are aborted."""

    def script(payload, number):
        if is_held(payload):
            held.add(payload["rid"])
            return {"hold": True, "tokens": [30, 31]}
        return ends(payload)

    return script


def spare_args(tmp_path, engine, *flags, spares="2"):
    return make_args(tmp_path, engine, "--spare-samples-per-prompt", spares, *flags)


def test_a_sample_that_hangs_is_replaced_by_a_spare_and_ended_at_the_engine(tmp_path):
    held = set()
    with FakeEngine(hold(lambda payload: sample_index(payload) == 1, held)) as engine:
        args = spare_args(tmp_path, engine)
        source = make_source(args)
        output = generate_rollout(args, 0, source)
        aborted = {rid for rid in held if any(names(abort, rid) for abort in engine.aborts)}
    samples = flatten_samples(output.samples)
    assert sorted(s.index for s in samples) == list(range(8)), "a spare has the index of what it replaces"
    assert all(s.tokens[-s.response_length :] == [20, 21, EOS] and s.reward is not None for s in samples)
    assert len(held) == 1 and held <= aborted
    seeds = [request["sampling_params"]["sampling_seed"] for request in engine.requests]
    assert len(engine.requests) > 8 and len(set(seeds)) == len(seeds), "spares draw for themselves"
    assert_conserved(source)


def test_a_failure_is_made_up_for_and_too_many_of_them_are_told(tmp_path):
    def refuse(payload, number):
        return 400 if sample_index(payload) == 3 else ends(payload)

    with FakeEngine(refuse) as engine:
        args = spare_args(tmp_path, engine)
        samples = flatten_samples(generate_rollout(args, 0, make_source(args)).samples)
        assert sorted(s.index for s in samples) == list(range(8))
    with FakeEngine(lambda payload, number: 400) as engine:
        args = spare_args(tmp_path, engine)
        with pytest.raises(Exception, match="scripted 400"):
            generate_rollout(args, 0, make_source(args))


@pytest.mark.parametrize("function", ["three_turns", "three_turns_over_http"])
def test_episodes_of_sessions_are_replaced_too(tmp_path, function):
    held = set()

    def is_held(payload):
        return len(payload["input_ids"]) > 32 and len(held) < 1

    with FakeEngine(hold(is_held, held)) as engine:
        flags = ("--custom-generate-function-path", f"sessions_under_test.{function}")
        flags += ("--rollout-max-response-len", "100")
        args = make_args(tmp_path, engine, "--spare-samples-per-prompt", "1", *flags, max_context_len=400)
        source = make_source(args)
        samples = flatten_samples(generate_rollout(args, 0, source).samples)
        aborted = {rid for rid in held if any(names(abort, rid) for abort in engine.aborts)}
    assert sorted(s.index for s in samples) == list(range(8))
    assert sorted(s.rollout_id for s in samples) == list(range(8))
    assert all(len(s.metadata["turns"]) == 3 for s in samples)
    assert held <= aborted
    assert_conserved(source)


def test_what_the_end_of_a_rollout_cuts_keeps_its_places_and_continues(tmp_path):
    holding, held = {"on": True}, set()

    def is_held(payload):
        return holding["on"] and sample_index(payload) % (1 << 40) >= 2 * 4

    with FakeEngine(hold(is_held, held)) as engine:
        flags = ("--over-sampling-batch-size", "6", "--partial-rollout")
        args = spare_args(tmp_path, engine, *flags, spares="1")
        source = make_source(args)
        first = flatten_samples(generate_rollout(args, 0, source).samples)
        back = flatten_samples(source.buffer)
        assert sorted(s.index for s in first) == list(range(8)) and sorted(s.index for s in back) == [
            8,
            9,
            10,
            11,
        ]
        assert all(s.status is Sample.Status.ABORTED for s in back)
        holding["on"] = False
        second = flatten_samples(generate_rollout(args, 1, source).samples)
    again = {s.index: s for s in second}
    assert all(again[s.index].tokens[-5:] == [30, 31, 20, 21, EOS] for s in back if s.index in again)
    assert_conserved(source)
