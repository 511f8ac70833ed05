"""How trained tokens may be drawn: the rule of the flags holds for what a
generate function asks, however it asks.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import rollout_plugins
from fake_engine import FakeEngine
from rollout_helpers import make_args, make_source

from slime.arguments.groups import trained_sampling
from slime.arguments.groups.trained_sampling import refusal
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.collection.versions import name_versions
from slime.rollout.generation import policy_requests
from slime.rollout.generation.generate_request import build_request
from slime.rollout.generation.policy_requests import PolicyRequests, SamplingRefused, not_trained
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.top_p import to_meta
from slime.utils.types import Sample, flatten_samples
from slime.wire import protocol

BY_HAND = """
import asyncio
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.http_utils import post, stream
from slime.utils.types import Sample

CHANGES = {changes}

def url_of(args):
    return f"http://{{args.sglang_router_ip}}:{{args.sglang_router_port}}/generate"

def payload_of(args, sample, params):
    sample.tokens = sample.tokens or GenerateState(args).tokenizer.encode(sample.prompt)
    return {{"input_ids": sample.tokens, "sampling_params": {{**params, **CHANGES}}, "return_logprob": True}}

def take(sample, answer):
    triples = answer["meta_info"]["output_token_logprobs"]
    sample.tokens = sample.tokens + [t[1] for t in triples]
    sample.response_length += len(triples)
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + [t[0] for t in triples]
    sample.loss_mask = [1] * sample.response_length
    sample.status = Sample.Status.COMPLETED
    return sample

async def by_post(args, sample, sampling_params):
    return take(sample, await post(url_of(args), payload_of(args, sample, sampling_params)))

async def in_a_task(args, sample, sampling_params):
    return (await asyncio.gather(by_post(args, sample, sampling_params)))[0]

async def swallowed(args, sample, sampling_params):
    try:
        return await by_post(args, sample, sampling_params)
    except Exception:
        sample.status = Sample.Status.ABORTED
        return sample

async def turned_into_another(args, sample, sampling_params):
    try:
        return await by_post(args, sample, sampling_params)
    except Exception as error:
        raise KeyError("no answer") from error

async def by_stream(args, sample, sampling_params):
    async for event in stream(url_of(args), {{**payload_of(args, sample, sampling_params), "stream": True}}):
        pass

async def by_list(args, sample, sampling_params):
    payload = payload_of(args, sample, sampling_params)
    params = payload["sampling_params"]
    both = {{"input_ids": [sample.tokens] * 2, "sampling_params": [{{}}, params]}}
    answers = await post(url_of(args), {{**payload, **both}})
    return take(sample, answers[1])

async def by_openai(args, sample, sampling_params):
    url = url_of(args).replace("127.0.0.1", "localhost").replace("/generate", "/v1/chat/completions")
    await post(url, {{"model": "m", "messages": [], **CHANGES}})

async def by_default(args, sample, sampling_params):
    sampling_params.update(CHANGES)
    return await generate(args, sample, sampling_params)
"""
FUNCTIONS = (
    "by_post",
    "in_a_task",
    "swallowed",
    "turned_into_another",
    "by_stream",
    "by_list",
    "by_openai",
)
ASK = {"custom_params": {"return_top_p_token_ids": True}}


@pytest.fixture(autouse=True)
def fresh():
    rollout_plugins.calls.clear()
    reset_breaker()
    policy_requests._warn_of_temperature.cache_clear()


def write(tmp_path, **changes):
    file = tmp_path / "by_hand.py"
    file.write_text(BY_HAND.format(changes=changes))
    return file


def run_with(tmp_path, function, *flags, evaluation=False, script=None, **changes):
    """One rollout with a function of the file; returns (its output, how often the engine was asked)."""
    path = f"{write(tmp_path, **changes)}:{function}"
    with FakeEngine(script) as engine:
        args = make_args(tmp_path, engine, "--custom-generate-function-path", path, *flags)
        output = call_rollout_fn(generate_rollout, args, 0, make_source(args), evaluation=evaluation)
        return output, len(engine.requests)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_truncated_distribution_is_refused_however_it_is_asked_for(tmp_path, function):
    message = r"'top_p'\] is 0\.9: .*'custom_params'\].*return_top_p_token_ids.*--allow-sampling-mismatch"
    with pytest.raises(SamplingRefused, match=message):
        run_with(tmp_path, function, "--group-failure-action", "drop", top_p=0.9)


def tell(payload, number):
    told = payload["sampling_params"].get("custom_params") == ASK["custom_params"]
    return {"tokens": [20, 30], "meta": to_meta([np.array([20, 25]), np.array([30])]) if told else {}}


def test_our_own_requests_ask_for_the_nucleus_where_a_function_cuts_the_vocabulary(tmp_path):
    output, asked = run_with(tmp_path, "by_default", script=tell, top_p=0.9, min_p=0.01)
    assert asked == 8
    for sample in flatten_samples(output.samples):
        assert sample.rollout_top_p_token_ids.tolist() == [20, 25, 30]
        # Once it is recorded, a request that cuts nothing tells that too: tokens
        # without ids are of the whole vocabulary.
        args = make_args(tmp_path)
        assert build_request(args, sample, {"temperature": 1.0}, 8).sampling.return_top_p_token_ids
    assert not build_request(
        args, Sample(index=0, tokens=[5]), {"temperature": 1.0}, 8
    ).sampling.return_top_p_token_ids


def test_a_function_that_asks_for_the_nucleus_and_drops_it_is_refused(tmp_path):
    with pytest.raises(SamplingRefused, match="does not carry them: pass the answer's meta_info"):
        run_with(tmp_path, "by_post", script=tell, top_p=0.9, **ASK)


def test_engines_that_cannot_tell_refuse_what_a_function_cuts(tmp_path):
    args = make_args(tmp_path)
    args.rollout_external_engine_addrs = ["127.0.0.1:1"]
    for params in ({"top_p": 0.9}, {"top_p": 0.9, **ASK}):
        with pytest.raises(
            SamplingRefused,
            match=r"'top_p'\] is 0\.9: .*use engines that the run starts itself, which report",
        ):
            build_request(args, Sample(index=0, tokens=[5]), params, 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 20),
        ("top_k", 1),
        ("min_p", 0.05),
        ("min_new_tokens", 2),
        ("temperature", 0),
        ("repetition_penalty", 1.1),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("regex", "a+"),
        ("logit_bias", {"5": 9.0}),
    ],
)
def test_every_parameter_that_bends_the_distribution_is_refused(tmp_path, name, value):
    args = make_args(tmp_path)
    args.rollout_external_engine_addrs = ["127.0.0.1:1"]  # which are not asked what they keep
    sample = Sample(index=0, tokens=[5, 6])
    with pytest.raises(ValueError, match=rf"sampling_params\['{name}'\]"):
        build_request(args, sample, {"temperature": 1.0, name: value}, 8)
    args.allow_sampling_mismatch = True
    if name not in ("regex", "logit_bias"):  # which our own requests do not have
        assert build_request(args, sample, {"temperature": 1.0, name: value}, 8).input_ids == [5, 6]


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 1, "top_k": -1, "min_p": 0}, {"top_k": 128}, {"top_p": None, "stop": "x"}]
)
def test_neutral_values_pass(params):
    assert refusal(params, vocab_size=128) is None


def test_a_nucleus_that_the_engine_tells_passes_and_greedy_decoding_does_not():
    assert refusal({"top_p": 0.9, "top_k": 20}, nucleus_reported=True) is None
    assert "greedy" in refusal({"top_k": 1}, nucleus_reported=True)
    assert "min_new_tokens" in refusal({"top_p": 0.9, "min_new_tokens": 2}, nucleus_reported=True)


def test_an_accepted_mismatch_passes(tmp_path):
    output, asked = run_with(tmp_path, "by_post", "--allow-sampling-mismatch", top_p=0.9)
    assert asked == 8 and len(output.samples) == 4


def test_other_models_may_be_asked_in_any_way(tmp_path):
    file = write(tmp_path, top_p=0.9)
    with FakeEngine() as judge, FakeEngine() as engine:
        file.write_text(
            file.read_text()
            + "\nasync def with_judge(args, sample, sampling_params):\n"
            + f"    await post('{judge.url}/generate', payload_of(args, sample, sampling_params))\n"
            + "    CHANGES.clear()\n    return await by_post(args, sample, sampling_params)\n"
        )
        args = make_args(tmp_path, engine, "--custom-generate-function-path", f"{file}:with_judge")
        call_rollout_fn(generate_rollout, args, 0, make_source(args), evaluation=False)
    assert len(judge.requests) == len(engine.requests) == 8


def test_evaluation_may_sample_as_it_likes(tmp_path):
    data = tmp_path / "prompts.jsonl"
    flags = ("--eval-prompt-data", "held", str(data), "--eval-interval", "1", "--eval-top-p", "0.7")
    output, asked = run_with(tmp_path, "by_default", *flags, evaluation=True, min_p=0.1)
    assert asked == 16 and len(output.data["held"]["rewards"]) == 16


def test_a_reward_may_ask_the_policy_greedily(tmp_path):
    file = write(tmp_path)
    file.write_text(
        file.read_text()
        + "\nasync def judge(args, sample, **kwargs):\n"
        + "    request = build_request(args, sample, {'temperature': 0.0}, 4)\n"
        + "    await post(url_of(args), request.to_json())\n    return 1.0\n"
        + "from slime.rollout.generation.generate_request import build_request\n"
    )
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, "--custom-rm-path", f"{file}:judge")
        call_rollout_fn(generate_rollout, args, 0, make_source(args), evaluation=False)
    assert len(engine.requests) == 16


def test_a_greedy_baseline_of_remax_is_no_training_request(tmp_path):
    _, asked = run_with(tmp_path, "by_default", "--advantage-estimator", "remax")
    assert asked == 12


def test_another_temperature_is_told_once(tmp_path, caplog):
    run_with(tmp_path, "by_post", temperature=0.5)
    told = [r.getMessage() for r in caplog.records if "temperature 0.5" in r.getMessage()]
    assert len(told) == 1 and "--rollout-temperature 1" in told[0]


def test_samples_made_by_hand_name_the_weights_that_answered(tmp_path):
    output, _ = run_with(tmp_path, "by_post")
    assert all(s.version_spans == [("run:1", 0, 4)] for s in flatten_samples(output.samples))


def test_only_trained_tokens_without_a_version_get_the_oldest_that_answered():
    sample = Sample(response_length=6, loss_mask=[1, 1, 0, 1, 1, 1], version_spans=[("run:9", 4, 5)])
    name_versions(sample, {"run:12", "default", "run:11"})
    assert sample.version_spans == [("run:11", 0, 2), ("run:11", 3, 4), ("run:9", 4, 5), ("run:11", 5, 6)]
    untouched = Sample(response_length=2)
    name_versions(untouched, {"default"})
    assert untouched.version_spans == []


def test_not_trained_ends_with_its_block(tmp_path):
    args, sample = make_args(tmp_path), Sample(index=0, tokens=[5])
    with not_trained():
        assert not build_request(
            args, sample, {"top_p": 0.5, "temperature": 0}, 4
        ).sampling.return_top_p_token_ids
    with pytest.raises(SamplingRefused):
        build_request(args, sample, {"top_p": 0.5, "temperature": 0}, 4)


def test_next_to_greedy_is_greedy_for_the_rule_and_for_engines_alike():
    assert trained_sampling.GREEDY_BELOW == protocol.GREEDY_BELOW
    for temperature in (0, 0.0, 1e-40, 9.9e-7):
        assert "greedy" in refusal({"temperature": temperature})
        assert protocol.SamplingParams(temperature=temperature).greedy
    assert refusal({"temperature": 1e-6}) is None and not protocol.SamplingParams(temperature=1e-6).greedy


@pytest.mark.parametrize("ids", [[5, 128], [-1], [True], [5.0], [2**70], [[5], [128]], (5, 128)])
def test_a_token_id_that_the_model_does_not_have_is_not_sent_to_any_engine(ids):
    args = SimpleNamespace(
        engine_urls=["http://127.0.0.1:9"], sglang_router_ip="127.0.0.1", sglang_router_port=9, vocab_size=128
    )

    async def send():
        with PolicyRequests(args).entered():
            await http_utils.post("http://127.0.0.1:9/generate", {"input_ids": ids}, max_retries=0)

    with pytest.raises(http_utils.HttpError, match="not sent: input_ids has token id") as error:
        run(send())
    assert error.value.status == 400
