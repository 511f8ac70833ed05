"""What every engine behind the protocol must do: weights, memory, health, and bad requests refused."""

import asyncio

import aiohttp
import pytest
from devices import CLOSE
from engine_under_test import CONTEXT, VOCAB, largest_difference, met, plain_log_probs

from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError

PROMPT = [10, 20, 30, 40, 50]
LONG_PROMPT = [(7 * i + i * i) % 96 + 4 for i in range(300)]


# -- weights -------------------------------------------------------------------------------------------------


def test_after_a_push_a_cached_prompt_is_computed_with_the_new_weights(engine, new_model):
    engine.generate(LONG_PROMPT, max_new_tokens=5)
    assert engine.generate(LONG_PROMPT, max_new_tokens=5).cached_tokens >= 256
    receipt = run(engine.push(new_model, "run:1"))
    assert receipt.version == "run:1" == run(engine.control.version())
    assert receipt.tensors in (len(new_model.state_dict()), None)
    made = engine.generate(LONG_PROMPT, max_new_tokens=30, ignore_eos=True)
    assert made.cached_tokens == 0 and made.weight_version == "run:1"
    assert largest_difference(made.log_probs, plain_log_probs(new_model, LONG_PROMPT, made.ids)) < CLOSE


def test_requests_in_flight_during_a_push_carry_version_spans(engine, old_model, new_model):
    dialect = engine.can.dialect
    engine.need(dialect.has_spans and dialect.flush_while_running, "a push under running requests")

    async def push():
        task = asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=300, ignore_eos=True))
        await engine.running(tokens=10)
        await engine.push(new_model, "run:1")
        made = await task
        met(len(made.spans) > 1)
        return made

    made = engine.meet(push)
    first, second = made.spans
    assert (first.version, first.start, second.version, second.end) == ("default", 0, "run:1", 300)
    assert first.end == second.start and 10 <= first.end < 300
    old_part = made.ids[: first.end]
    assert (
        largest_difference(made.log_probs[: first.end], plain_log_probs(old_model, PROMPT, old_part)) < CLOSE
    )
    # what a request that crossed the push has cached is of mixed weights: nobody may reuse it
    again = engine.generate([*PROMPT, *made.ids[:100]], max_new_tokens=20, ignore_eos=True)
    expected = plain_log_probs(new_model, [*PROMPT, *made.ids[:100]], again.ids)
    assert again.cached_tokens == 0 and largest_difference(again.log_probs, expected) < CLOSE


def test_a_retracted_request_goes_on_wholly_with_the_new_weights(engine, old_model, new_model):
    engine.need(engine.can.dialect.has_spans, "versions per token")

    async def push():
        task = asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=200, ignore_eos=True))
        await engine.running(tokens=10)
        await engine.control.pause("retract")
        await engine.control.flush()
        await engine.push(new_model, "run:1")
        await engine.control.resume()
        made = await task
        met(len(made.spans) > 1)
        return made

    made = engine.meet(push)
    cut = made.spans[0].end
    assert [s.version for s in made.spans] == ["default", "run:1"]
    old, new = (plain_log_probs(model, PROMPT, made.ids) for model in (old_model, new_model))
    assert largest_difference(made.log_probs, [*old[:cut], *new[cut:]]) < CLOSE


def test_a_request_held_in_place_goes_on_from_its_cache_with_the_new_weights(engine, old_model, new_model):
    dialect = engine.can.dialect
    engine.need(dialect.has_spans and dialect.flush_while_running, "a push under requests held in place")

    async def push():
        task = asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=200, ignore_eos=True))
        await engine.running(tokens=10)
        await engine.control.pause("in_place")
        await engine.control.flush()
        await engine.push(new_model, "run:1")
        await engine.control.resume()
        made = await task
        met(len(made.spans) > 1)
        return made

    made = engine.meet(push)
    cut = made.spans[0].end
    assert [s.version for s in made.spans] == ["default", "run:1"] and made.meta["num_retractions"] == 0
    old = plain_log_probs(old_model, PROMPT, made.ids[:cut])
    assert largest_difference(made.log_probs[:cut], old) < CLOSE
    # Not that of the new model from the start: what is cached of the request is of the old weights.
    new = plain_log_probs(new_model, PROMPT, made.ids)
    assert largest_difference(made.log_probs[cut:], new[cut:]) > 1e-4


def test_an_aborted_request_is_sent_again_with_what_it_made_and_the_new_weights(engine, new_model):
    async def push():
        task = asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=200, ignore_eos=True))
        await engine.running(tokens=10)
        await engine.control.pause("abort")
        first = await task
        met(first.finish == "abort")
        await engine.push(new_model, "run:1")
        await engine.control.resume()
        left = 200 - len(first.ids)
        return first, await engine.agenerate([*PROMPT, *first.ids], max_new_tokens=left, ignore_eos=True)

    first, rest = engine.meet(push)
    assert len(first.ids) + len(rest.ids) == 200
    assert (first.weight_version, rest.weight_version) == ("default", "run:1")
    expected = plain_log_probs(new_model, [*PROMPT, *first.ids], rest.ids)
    assert largest_difference(rest.log_probs, expected) < CLOSE


def test_a_checkpoint_folder_becomes_the_weights(engine, new_folder, new_model):
    receipt = run(engine.control.update_from_disk(str(new_folder), "run:2"))
    assert receipt.version == "run:2"
    made = engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert made.weight_version == "run:2"
    assert largest_difference(made.log_probs, plain_log_probs(new_model, PROMPT, made.ids)) < CLOSE


def test_one_flipped_bit_fails_the_push_and_the_old_version_serves_on(engine, old_model, new_model):
    with engine.published(new_model.state_dict(), "run:1") as (manifest, segments):
        segments[-1].buffer[4321] ^= 4
        with pytest.raises(HttpError, match="checksum") as error:
            run(engine.control.update_from_shared_memory(manifest))
    assert error.value.status == 400
    assert run(engine.control.version()) == "default"
    made = engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert made.weight_version == "default"
    assert largest_difference(made.log_probs, plain_log_probs(old_model, PROMPT, made.ids)) < CLOSE


def changed_state(model, **changes):
    return {**model.state_dict(), **changes}


@pytest.mark.parametrize(
    "fault", ["unknown name", "missing name", "wrong shape", "missing segment", "missing bucket"]
)
def test_a_push_that_does_not_fit_the_model_is_refused_whole(engine, old_model, new_model, fault):
    state = dict(new_model.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "unknown name":
        state["model.layers.7.mlp.up_proj.weight"] = state[name].clone()
    if fault == "missing name":
        del state[name]
    if fault == "wrong shape":
        state[name] = state[name][:-1].contiguous()
    with engine.published(state, "run:1") as (manifest, segments):
        payload = manifest.to_json()
        if fault == "missing segment":
            segments[1].unlink()
        if fault == "missing bucket":
            payload["buckets"].pop()
        with pytest.raises(HttpError) as error:
            engine.post("update_weights_from_shared_memory", payload)
    assert error.value.status == 400
    made = engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    assert made.weight_version == "default"
    assert largest_difference(made.log_probs, plain_log_probs(old_model, PROMPT, made.ids)) < CLOSE


def test_a_bad_checkpoint_folder_is_refused_and_the_old_version_serves_on(engine, old_model, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a checkpoint")
    # The first one is a file that cannot be read: engines that are not strict may end over it.
    for folder in (*([tmp_path] if engine.is_strict else []), tmp_path / "nowhere"):
        with pytest.raises(HttpError) as error:
            run(engine.control.update_from_disk(str(folder), "run:1"))
        assert error.value.status == 400
    made = engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    assert made.weight_version == "default"
    assert largest_difference(made.log_probs, plain_log_probs(old_model, PROMPT, made.ids)) < CLOSE


def test_check_equal_names_exactly_the_tensors_that_differ(engine, old_model):
    state = {name: tensor.clone() for name, tensor in old_model.state_dict().items()}
    with engine.published(state, "x") as (manifest, _):
        assert run(engine.control.check_equal(manifest)) == []
    state["model.norm.weight"][3] += 1e-3
    del state["model.layers.0.mlp.up_proj.weight"]
    with engine.published(state, "x") as (manifest, _):
        assert run(engine.control.check_equal(manifest)) == [
            "model.norm.weight",
            "model.layers.0.mlp.up_proj.weight",
        ]


def test_the_engine_s_own_checksums_change_with_the_weights(engine, new_model):
    before = run(engine.control.checksums())
    run(engine.push(new_model, "run:1"))
    after = run(engine.control.checksums())
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if "norm" not in name}  # norms start as ones in both


def test_the_version_can_be_renamed_without_weights(engine):
    run(engine.control.set_version("run:9"))
    assert engine.generate(PROMPT, max_new_tokens=2).weight_version == "run:9"


# -- memory and health ---------------------------------------------------------------------------------------


def test_release_frees_the_kv_pool_and_generation_after_resume_is_identical(engine):
    before = engine.generate(PROMPT, sampling_seed=2, max_new_tokens=40, ignore_eos=True)
    pool, held = engine.counter("kv_pool_bytes"), engine.counter("memory_bytes")
    assert pool > 30 << 20
    run(engine.control.release())
    assert engine.counter("kv_pool_bytes") == 0
    assert held - engine.counter("memory_bytes") > 0.9 * pool
    with pytest.raises(HttpError, match="released") as error:
        engine.generate(PROMPT, max_new_tokens=1)
    assert error.value.status == 503
    run(engine.control.restore(["weights"]))
    run(engine.control.restore(["kv_cache", "cuda_graph"]))
    after = engine.generate(PROMPT, sampling_seed=2, max_new_tokens=40, ignore_eos=True)
    assert after.ids == before.ids and largest_difference(after.log_probs, before.log_probs) < 1e-5


def test_a_request_in_flight_survives_release_and_resume(engine):
    engine.need(engine.can.memory_saver, "to give memory back")
    whole = engine.generate(PROMPT, sampling_seed=2, max_new_tokens=200, ignore_eos=True)

    async def release():
        task = asyncio.create_task(
            engine.agenerate(PROMPT, sampling_seed=2, max_new_tokens=200, ignore_eos=True)
        )
        await engine.running(tokens=10)
        await engine.control.release(["kv_cache"])
        await engine.control.restore(["kv_cache"])
        return await task

    assert engine.meet(release).ids == whole.ids


def test_health_probes_answer_also_while_paused(engine):
    engine.need(engine.is_strict, "probes while paused")
    assert run(engine.control.healthy())
    run(engine.control.pause("in_place"))
    assert run(engine.control.healthy())


def test_a_busy_engine_answers_health_probes_before_its_queue_is_empty(engine):
    async def probe():
        tasks = [
            asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=450, ignore_eos=True))
            for _ in range(20)
        ]
        await engine.running(tokens=20)
        healthy = await engine.control.healthy()
        unfinished = sum(not task.done() for task in tasks)
        await engine.abort_all()
        await asyncio.gather(*tasks)
        met(unfinished == 20)
        return healthy

    assert engine.meet(probe)


def test_server_info_says_what_the_engine_can_do(engine):
    info = run(engine.control.info())
    assert "disk" in info.transports and info.num_ranks == 1
    assert info.weight_version == "default"
    assert info.vocab_size in (VOCAB, None) and info.context_len in (CONTEXT, None)  # None: it does not say


# -- bad requests --------------------------------------------------------------------------------------------

BAD_REQUESTS = {
    "no prompt": ({"sampling_params": {}}, "input_ids"),
    "two prompts": ({"input_ids": [5], "text": "a"}, "exactly one"),
    "empty prompt": ({"input_ids": []}, "input_ids"),
    "prompt of strings": ({"input_ids": ["a"]}, "input_ids"),
    "prompt of floats": ({"input_ids": [1.5]}, "input_ids"),
    "id out of the vocabulary": ({"input_ids": [5, VOCAB]}, f"token id {VOCAB}"),
    "negative id": ({"input_ids": [5, -1]}, "token id -1"),
    "prompt as long as the context": ({"input_ids": [5] * CONTEXT}, "longer than"),
    "unknown sampling field": ({"input_ids": [5], "sampling_params": {"seed": 1}}, "seed"),
    "unknown field": ({"input_ids": [5], "frobnicate": 3}, "frobnicate"),
    "bad temperature": ({"input_ids": [5], "sampling_params": {"temperature": "hot"}}, "temperature"),
    "negative temperature": ({"input_ids": [5], "sampling_params": {"temperature": -0.1}}, "temperature"),
    "bad top_p": ({"input_ids": [5], "sampling_params": {"top_p": 1.1}}, "top_p"),
    "unknown custom parameter": (
        {"input_ids": [5], "sampling_params": {"custom_params": {"mask": 1}}},
        "mask",
    ),
    "custom parameter of wrong type": (
        {"input_ids": [5], "sampling_params": {"custom_params": {"return_top_p_token_ids": 1}}},
        "return_top_p_token_ids",
    ),
    "bad stop": ({"input_ids": [5], "sampling_params": {"stop": 5}}, "stop"),
    "bad max_new_tokens": ({"input_ids": [5], "sampling_params": {"max_new_tokens": -4}}, "max_new_tokens"),
    "sampling_params of wrong type": ({"input_ids": [5], "sampling_params": "x"}, "sampling_params"),
    "stream of wrong type": ({"input_ids": [5], "stream": "yes"}, "stream"),
    "rid of wrong type": ({"input_ids": [5], "rid": 5}, "rid"),
    "not an object": ([1, 2], "object"),
}

REFUSED_BY_ALL = ("prompt as long as the context", "unknown sampling field", "bad top_p")


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_a_400_that_names_it_and_the_engine_lives(engine, name):
    if name not in REFUSED_BY_ALL:
        engine.need(engine.is_strict, "to refuse every bad request")
    payload, word = BAD_REQUESTS[name]
    with pytest.raises(HttpError) as error:
        engine.post("generate", payload)
    assert error.value.status == 400
    assert word in error.value.body
    assert len(engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True).ids) == 2


@pytest.mark.parametrize(
    ("endpoint", "payload"),
    [
        ("pause_generation", {"mode": "sideways"}),
        ("abort_request", {}),
        ("release_memory_occupation", {"tags": ["everything"]}),
        ("weights_checker", {"action": "guess"}),
        ("update_weights_from_shared_memory", {"version": "x"}),
        ("update_weights_from_disk", {}),
        ("update_weight_version", {}),
    ],
)
def test_a_bad_control_call_is_a_400(engine, endpoint, payload):
    engine.need(engine.is_strict, "to refuse every bad call")
    with pytest.raises(HttpError) as error:
        engine.post(endpoint, payload)
    assert error.value.status == 400


def test_a_body_that_is_not_json_is_a_400(engine):
    engine.need(engine.is_strict, "to refuse every bad request")

    async def send():
        url = f"{engine.url}/generate"
        async with (
            aiohttp.ClientSession(headers=engine.headers) as session,
            session.post(url, data=b"{no", headers={"Content-Type": "application/json"}) as response,
        ):
            return response.status, await response.text()

    status, body = run(send())
    assert status == 400 and "not JSON" in body


# -- who may ask ---------------------------------------------------------------------------------------------


async def status_of(engine, method: str, endpoint: str, authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{engine.url}/{endpoint}", json={}, headers=headers) as answer,
    ):
        return answer.status


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {token}", "{token}"])
def test_without_the_token_nobody_controls_or_uses_an_engine_that_asks_for_it(engine, given):
    token = http_utils.token_of(engine.url)
    engine.need(token is not None, "to ask for a token")
    authorization = given.format(token=token) if given is not None else None
    control = ("pause_generation", "update_weights_from_disk", "release_memory_occupation", "abort_request")
    for endpoint in (*control, "update_weight_version", "generate", "flush_cache"):
        assert run(status_of(engine, "POST", endpoint, authorization)) == 401, endpoint
    for endpoint in ("server_info", "model_info", "v1/loads"):  # SGLang's tell the token itself
        assert run(status_of(engine, "GET", endpoint, authorization)) == 401, endpoint
    assert run(status_of(engine, "GET", "health", authorization)) == 200
    assert engine.generate(PROMPT, max_new_tokens=2).weight_version == "default"
