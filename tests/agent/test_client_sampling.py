"""An agent program sends its own sampling: the run continues, and trains only what its policy drew."""

import pytest
import sessions_under_test
from fake_engine import FakeEngine
from rollout_helpers import assert_conserved, make_args, make_source

from slime.observability.rollout_metrics import agent_metrics
from slime.rollout.generation import client_requests
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import flatten_samples

EOS = 2  # <|im_end|> of the tiny tokenizer
WROTE = [20, 21, 22, 23, EOS]
PATHS = list(sessions_under_test.BODIES)
CHAT = "/v1/chat/completions"


def play(tmp_path, asks, *flags):
    """(samples, what the engine was asked for) of a rollout whose client sends `asks`."""
    sampling = []

    def answer(payload, number):
        sampling.append(payload["sampling_params"])
        ended = {"finish_reason": {"type": "stop", "matched": EOS}}
        return {"tokens": WROTE, "finish": "stop", "meta": ended}

    sessions_under_test.client_asks[:] = asks
    sessions_under_test.client_statuses.clear()
    client_requests._warn.cache_clear()
    with FakeEngine(answer) as engine:
        args = make_args(
            tmp_path, engine, "--rollout-batch-size", "2", "--rollout-max-response-len", "100",
            "--custom-generate-function-path", "sessions_under_test.client_that_chooses", *flags,
            max_context_len=200,
        )  # fmt: skip
        source = make_source(args)
        samples = flatten_samples(generate_rollout(args, 0, source).samples)
        assert_conserved(source)
    return samples, sampling


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{"top_p": 0.5}, {"temperature": 0}, {"temperature": 0.7}])
def test_a_turn_with_sampling_of_its_own_is_generated_as_asked_and_not_trained(
    tmp_path, path, fields, caplog
):
    samples, sampling = play(tmp_path, [(path, fields), (path, {})])
    assert sessions_under_test.client_statuses == {200}
    [(name, value)] = fields.items()
    assert sorted(params.get(name, 1.0) for params in sampling) == sorted([value, 1.0] * 4)
    assert sum(sum(sample.loss_mask) for sample in samples) == 4 * len(WROTE)
    turns = [turn for sample in samples for turn in sample.metadata["turns"]]
    assert all(turn["trained"] == ("untrained" not in turn) for turn in turns)
    assert agent_metrics(samples)["untrained_turns"] == 1.0
    [warning] = {r.message for r in caplog.records if r.levelname == "WARNING" and "client" in r.message}
    assert name in warning and "not trained" in warning and "--agent-client-sampling run" in warning


def test_an_episode_whose_turns_are_all_sampled_otherwise_keeps_its_reward_and_trains_nothing(tmp_path):
    samples, _ = play(tmp_path, [(CHAT, {"temperature": 0}), (CHAT, {"temperature": 0})])
    assert samples and {sample.reward for sample in samples} == {1.0}
    assert not any(any(sample.loss_mask) for sample in samples)
    assert all(len(sample.loss_mask) == sample.response_length > 0 for sample in samples)
    assert not any(sample.reward_failure for sample in samples)


def test_the_runs_own_sampling_takes_the_place_of_the_clients_where_the_user_chose_that(tmp_path):
    asks = [(CHAT, {"temperature": 0, "top_p": 0.5, "frequency_penalty": 1.0, "stop": ["x"], "seed": 7})]
    samples, sampling = play(tmp_path, asks, "--agent-client-sampling", "run")
    for params in sampling:
        assert params.get("temperature", 1.0) == params.get("top_p", 1.0) == 1.0
        assert not params.get("frequency_penalty")
        assert params["stop"] == ["x"] and params["sampling_seed"] == 7
    assert sum(sum(sample.loss_mask) for sample in samples) == 4 * len(WROTE)


@pytest.mark.parametrize("flags", [(), ("--agent-client-sampling", "run")])
def test_a_schema_of_a_client_holds_and_its_turn_is_not_trained(tmp_path, flags):
    asks = [(CHAT, {"response_format": {"type": "json_object"}}), (CHAT, {})]
    samples, sampling = play(tmp_path, asks, *flags)
    assert (
        sorted(params.get("json_schema", "") for params in sampling) == [""] * 4 + ['{"type": "object"}'] * 4
    )
    assert sum(sum(sample.loss_mask) for sample in samples) == 4 * len(WROTE)
    assert agent_metrics(samples)["untrained_turns"] == 1.0


def test_a_user_who_accepts_the_mismatch_trains_what_the_client_asked_for(tmp_path):
    samples, sampling = play(tmp_path, [(CHAT, {"top_p": 0.5})], "--allow-sampling-mismatch")
    assert {params["top_p"] for params in sampling} == {0.5}
    assert sum(sum(sample.loss_mask) for sample in samples) == 4 * len(WROTE)
