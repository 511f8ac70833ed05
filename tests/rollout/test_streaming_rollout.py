"""The streaming generate function: what was read is never lost."""

import pytest
import rollout_plugins
from fake_engine import FakeEngine
from rollout_helpers import assert_conserved, make_args, make_source

from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.http_utils import HttpError
from slime.utils.types import Sample, flatten_samples

STREAMING = ("--custom-generate-function-path", "slime.rollout.sglang_streaming_rollout.generate_streaming")


@pytest.fixture(autouse=True)
def fresh():
    rollout_plugins.calls.clear()
    reset_breaker()


def test_a_streamed_batch_equals_the_plain_one(tmp_path):
    batches = []
    for flags in ((), STREAMING):
        with FakeEngine() as engine:
            args = make_args(tmp_path, engine, *flags)
            batches.append(flatten_samples(generate_rollout(args, 0, make_source(args)).samples))
    for plain, streamed in zip(*batches, strict=True):
        plain.session_id = streamed.session_id = None
        plain.__dict__.pop("trace", None), streamed.__dict__.pop("trace", None)
        assert streamed == plain


def test_an_abort_keeps_what_was_streamed(tmp_path):
    def hold_late(payload, number):
        return {"hold": True, "tokens": [33, 34]} if number >= 8 else None

    with FakeEngine(hold_late) as engine:
        args = make_args(tmp_path, engine, "--over-sampling-batch-size", "8", "--partial-rollout", *STREAMING)
        source = make_source(args)
        generate_rollout(args, 0, source)
    partial = flatten_samples(source.buffer)
    assert len(partial) == 8
    assert all(s.status is Sample.Status.ABORTED and s.tokens[2:] == [33, 34] for s in partial)
    assert all(s.version_spans == [("run:1", 0, 2)] and s.rollout_log_probs == [-0.5, -0.5] for s in partial)
    assert_conserved(source)


def test_a_broken_stream_goes_on_from_the_last_token_that_was_read(tmp_path):
    with FakeEngine(lambda payload, number: {"break_after": 2} if number < 3 else None) as engine:
        args = make_args(tmp_path, engine, *STREAMING)
        samples = flatten_samples(generate_rollout(args, 0, make_source(args)).samples)
        assert len(engine.requests) == 8 + 3
        resumed = [r for r in engine.requests if len(r["input_ids"]) > 2]
        assert len(resumed) == 3 and all(r["sampling_params"]["max_new_tokens"] == 6 for r in resumed)
    assert sorted(s.response_length for s in samples) == [4] * 5 + [6] * 3
    assert all(s.status is Sample.Status.COMPLETED for s in samples)


def test_a_client_error_is_not_sent_again(tmp_path):
    with FakeEngine(lambda payload, number: 400) as engine:
        args = make_args(tmp_path, engine, *STREAMING)
        with pytest.raises(HttpError, match="answered 400"):
            generate_rollout(args, 0, make_source(args))
        assert len(engine.requests) <= 8


def test_server_errors_and_garbage_are_tried_again(tmp_path):
    answers = {0: 503, 1: "data: nonsense\n\n", 2: "<html>"}
    with FakeEngine(lambda payload, number: answers.get(number)) as engine:
        args = make_args(tmp_path, engine, *STREAMING)
        samples = flatten_samples(generate_rollout(args, 0, make_source(args)).samples)
    assert len(engine.requests) == 8 + 3
    assert all(s.response_length == 4 for s in samples)
