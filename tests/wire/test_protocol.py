"""The typed values read and write what engines really send."""

import pytest

from slime.catalog.engines import ENGINES
from slime.wire.dialects import dialect_of
from slime.wire.protocol import EngineInfo, GenerateRequest, Generation, SamplingParams, VersionSpan

RECORDED_ANSWER = {
    "text": "8-",
    "output_ids": [26, 310, 15],
    "meta_info": {
        "id": "my-rid-1",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 5,
        "weight_version": "b",
        "output_token_logprobs": [[-1.9, 26, None], [-2.7, 310, None], [-0.01, 15, None]],
        "completion_tokens": 3,
        "cached_tokens": 4,
        "weight_versions": [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3}],
    },
}


def with_meta(**changes):
    return {**RECORDED_ANSWER, "meta_info": {**RECORDED_ANSWER["meta_info"], **changes}}


def test_a_recorded_answer_becomes_a_generation():
    generation = Generation.from_json(RECORDED_ANSWER)
    assert generation.ids == (26, 310, 15)
    assert generation.log_probs == (-1.9, -2.7, -0.01)
    assert generation.finish == "length"
    assert generation.spans == (VersionSpan("a", 0, 2), VersionSpan("b", 2, 3))
    assert (generation.prompt_tokens, generation.cached_tokens, generation.text) == (5, 4, "8-")


def test_an_engine_without_spans_gives_one_span_over_all_tokens():
    answer = with_meta()
    del answer["meta_info"]["weight_versions"]
    assert Generation.from_json(answer).spans == (VersionSpan("b", 0, 3),)


def test_without_log_probs_the_ids_still_come():
    answer = with_meta()
    del answer["meta_info"]["output_token_logprobs"]
    generation = Generation.from_json(answer)
    assert generation.ids == (26, 310, 15) and generation.log_probs is None


def test_fewer_log_probs_than_tokens_is_an_error():
    with pytest.raises(ValueError, match="2 log-probs for 3 output tokens"):
        Generation.from_json(with_meta(output_token_logprobs=[[-1.9, 26, None], [-2.7, 310, None]]))


def test_spans_that_leave_a_gap_are_an_error():
    with pytest.raises(ValueError, match="do not cover the 3 output tokens"):
        Generation.from_json(with_meta(weight_versions=[{"version": "a", "start": 0, "end": 2}]))


def test_an_unfinished_answer_is_an_error():
    with pytest.raises(ValueError, match="finish_reason None"):
        Generation.from_json(with_meta(finish_reason=None))


def test_sampling_params_survive_json():
    sampling = SamplingParams(
        temperature=0.7, top_p=0.9, stop=("a", "b"), stop_token_ids=(3,), sampling_seed=5
    )
    assert SamplingParams.from_json(sampling.to_json()) == sampling


def test_a_single_stop_string_and_null_are_accepted():
    assert SamplingParams.from_json({"stop": "x", "stop_token_ids": None}).stop == ("x",)


def test_an_unknown_sampling_field_is_named():
    with pytest.raises(ValueError, match=r"unknown field `seed`.*sampling_seed"):
        SamplingParams.from_json({"seed": 1})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"temperature": True}, "temperature must be a finite number"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"min_p": 2}, "min_p is 2"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens is 5"),
        ({"stop": [1]}, "stop must be"),
        ({"stop": ""}, "stop must be"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids\\[0\\]"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"n": 0}, "n is 0"),
        ({"sampling_seed": "x"}, "sampling_seed must be an integer"),
    ],
)
def test_a_bad_sampling_value_is_named(bad, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_json(bad)


def test_a_request_carries_its_extra_fields():
    request = GenerateRequest([1, 2], SamplingParams(max_new_tokens=4), rid="r", extra={"image_data": "x"})
    assert request.to_json() == {
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 4},
        "return_logprob": True,
        "stream": False,
        "image_data": "x",
        "rid": "r",
    }


def test_the_dialect_is_read_from_the_server_info():
    assert dialect_of({"engine": "embedded"}) is ENGINES["embedded"].dialect
    assert dialect_of({"version": "0.5.16"}).name == "sglang<0.5.23"
    assert dialect_of({"version": "0.5.23.post1"}) is ENGINES["sglang"].dialect


def test_engine_info_of_sglang_takes_the_version_from_model_info():
    info = EngineInfo.from_json(
        {"version": "0.5.23", "model_path": "/m", "weight_version": "old", "enable_memory_saver": True},
        {"model_path": "/m2", "weight_version": "run:3"},
    )
    assert (info.model_path, info.weight_version, info.vocab_size) == ("/m2", "run:3", None)
    assert info.dialect.has_begin_end and info.memory_saver
