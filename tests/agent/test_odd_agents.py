"""Generate functions as strangers write them: what is wrong is named, nothing is lost or trained wrongly."""

import pytest
from fake_engine import FakeEngine
from rollout_helpers import assert_conserved, make_args, make_source

from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import flatten_samples

EOS = 2  # <|im_end|> of the tiny tokenizer
WROTE = [20, 21, 22, 23, EOS]


def answer(payload, number):
    return {"tokens": WROTE, "finish": "stop", "meta": {"finish_reason": {"type": "stop", "matched": EOS}}}


def play(tmp_path, function, *flags):
    with FakeEngine(answer) as engine:
        args = make_args(
            tmp_path, engine, "--rollout-batch-size", "2", "--rollout-max-response-len", "100",
            "--custom-generate-function-path", f"sessions_under_test.{function}", *flags, max_context_len=100,
        )  # fmt: skip
        source = make_source(args)
        samples = flatten_samples(generate_rollout(args, 0, source).samples)
        assert_conserved(source)
    return samples


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("says_nothing", "returned NoneType; return a Sample"),
        ("asks_nothing", "the policy generated nothing \\(no request was made\\)"),
        ("shares_a_key", "session 'agent' is open already: a key names one episode"),
        ("never_stops", "let ContextExhausted escape \\(prompt is too long: [0-9]+ tokens > 99 maximum\\)"),
    ],
)
def test_a_function_that_is_wrong_is_named_with_what_it_did(tmp_path, function, said):
    with pytest.raises(Exception, match=said) as stopped:
        play(tmp_path, function, "--reward-failure-action", "stop")
    assert any(word in str(stopped.value) for word in (function, "reward", "ContextExhausted"))


def test_an_episode_whose_context_is_full_trains_the_turns_that_it_has(tmp_path):
    samples = play(tmp_path, "stops_when_full")
    assert len(samples) == 4
    for sample in samples:
        told = sample.metadata["session"]
        assert told["outcome"] == "context" and told["num_turns"] > 1
        assert sum(sample.loss_mask) == told["num_turns"] * len(WROTE)
        assert len(sample.tokens) <= 100
