"""Episodes of sessions over the end of a rollout: they wait and go on, or they begin again."""

import pytest
import sessions_under_test as episodes
from fake_engine import FakeEngine
from patience import eventually
from rollout_helpers import assert_conserved, make_args, make_source

from slime.observability.rollout_metrics import agent_metrics
from slime.rollout.generation import turn_gate
from slime.rollout.prompt_groups import copy_sample
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample, flatten_samples

EOS = 2  # <|im_end|> of the tiny tokenizer
WROTE = [20, 21, 22, 23, EOS]


@pytest.fixture(autouse=True)
def fresh():
    episodes.made.clear()
    yield
    turn_gate.forget_all()


def answer():
    return {"tokens": WROTE, "finish": "stop", "meta": {"finish_reason": {"type": "stop", "matched": EOS}}}


def cut_rollout(tmp_path, function, *flags, waits=True):
    """A rollout that ends while episodes are in their second turn; then others, which hold nothing."""
    holding, held_back = {"on": True}, set()

    def hold_some(payload, number):
        if not holding["on"] or len(payload["input_ids"]) < 32:
            return answer()
        if payload["rid"] not in held_back and len(held_back) < 4:
            held_back.add(payload["rid"])
            return {"hold": True, "tokens": [30, 31]}
        return {**answer(), "until": lambda: len(held_back) == 4}

    with FakeEngine(hold_some) as engine:
        args = make_args(
            tmp_path, engine, "--rollout-batch-size", "2", "--over-sampling-batch-size", "6",
            "--custom-generate-function-path", f"sessions_under_test.{function}",
            "--rollout-max-response-len", "100", *flags, max_context_len=400,
        )  # fmt: skip
        args.n_samples_per_prompt = 1
        source = make_source(args)
        first = generate_rollout(args, 0, source)
        held = [copy_sample(s) for group in source.buffer for s in flatten_samples(group)]
        aborted = engine.aborted
        holding["on"] = False
        engine.version = "run:2"
        args.over_sampling_batch_size = 2
        if not waits:
            forget_all()
        samples = [*flatten_samples(first.samples)]
        for number in (1, 2):
            samples += flatten_samples(generate_rollout(args, number, source).samples)
        assert_conserved(source)
    assert held_back <= aborted, "requests of episodes end at the engine with their rollout"
    return held, {s.index: s for s in samples}


def forget_all():
    """What a restart does: nothing is left of the calls that waited."""
    left = {call.task for call in turn_gate._waiting.values()}
    turn_gate.forget_all()
    assert left
    eventually(lambda: all(task.done() for task in left))


def trained_turns(sample):
    start = len(sample.tokens) - sample.response_length
    turns = sample.metadata["turns"]
    assert sum(sample.loss_mask) == sum(t["end"] - t["start"] for t in turns)
    return [sample.tokens[start + t["start"] : start + t["end"]] for t in turns]


@pytest.mark.parametrize("function", ["three_turns", "three_turns_over_http"])
def test_an_episode_that_is_cut_waits_and_continues_in_the_next_rollout(tmp_path, function):
    held, done = cut_rollout(tmp_path, function, "--partial-rollout")
    cut = [s.index for s in held if s.status is Sample.Status.ABORTED]
    assert len(cut) == 4 and len(done) == 6
    assert sorted(episodes.made) == sorted(done), "no episode begins twice"
    for index, sample in done.items():
        second = [30, 31, *WROTE] if index in cut else WROTE
        assert trained_turns(sample) == [WROTE, second, WROTE]
        if index in cut:  # the first tokens are those of the weights before the push
            start, end = (sample.metadata["turns"][1][k] for k in ("start", "end"))
            assert {("run:1", start, start + 2), ("run:2", start + 2, end)} <= _single(sample.version_spans)
    assert not turn_gate._waiting
    assert agent_metrics(list(done.values()))["turns"] == 3


def _single(spans):
    """Spans cut at every place where a test may look."""
    return {(v, a, b) for v, start, end in spans for a in range(start, end) for b in range(a + 1, end + 1)}


@pytest.mark.parametrize(
    ("flags", "waits"),
    [
        (("--partial-rollout", "--partial-episodes", "restart"), True),
        (("--partial-rollout", "--mask-offpolicy-in-partial-rollout"), True),
        (("--partial-rollout",), False),
        ((), True),
    ],
    ids=["by flag", "masked", "after a restart", "whole rollouts"],
)
@pytest.mark.parametrize("function", ["three_turns", "three_turns_over_http"])
def test_an_episode_that_is_cut_begins_again_and_trains_nothing_of_its_first_attempt(
    tmp_path, function, flags, waits
):
    _, done = cut_rollout(tmp_path, function, *flags, waits=waits)
    assert len(done) == 6 and len(episodes.made) == 10
    assert all(trained_turns(sample) == [WROTE] * 3 for sample in done.values())
