"""Requests that nobody sends on purpose: each is refused or answered, and the engine serves the next."""

import asyncio
import gzip
import json
import secrets
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import aiohttp
import pytest
from hostile_calls import CONTEXT, IDS, VOCAB, a_manifest, assert_serves, send, with_sampling
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.utils.async_utils import run

REFUSED = {
    "empty text": {"text": ""},
    "text that is too long": {"text": "a" * CONTEXT},
    "text far beyond the context": {"text": "a" * 10_000_000},
    "text of a list": {"text": ["a"]},
    "text of a number": {"text": 5},
    "lone surrogate": {"text": "a\ud800b"},
    "empty ids": {"input_ids": []},
    "empty ids in a batch": {"input_ids": [[5], []]},
    "mixed batch": {"input_ids": [[5], 6]},
    "mixed ids": {"input_ids": [5, [6]]},
    "id out of the vocabulary": {"input_ids": [VOCAB]},
    "huge id": {"input_ids": [2**70]},
    "negative id": {"input_ids": [-1]},
    "bool id": {"input_ids": [True]},
    "float id": {"input_ids": [5.0]},
    "null id": {"input_ids": [None]},
    "ids of an object": {"input_ids": {"0": 5}},
    "negative temperature": with_sampling(temperature=-1e-9),
    "huge temperature": with_sampling(temperature=10**400),
    "temperature of a bool": with_sampling(temperature=True),
    "top_k beyond 64 bits": with_sampling(top_k=2**63),
    "top_k of zero": with_sampling(top_k=0),
    "top_k of -2": with_sampling(top_k=-2),
    "top_k of a float": with_sampling(top_k=2.5),
    "top_p of zero": with_sampling(top_p=0),
    "min_p above one": with_sampling(min_p=1.5),
    "a billion samples": with_sampling(n=10**9),
    "no sample": with_sampling(n=0),
    "max_new_tokens of -1": with_sampling(max_new_tokens=-1),
    "max_new_tokens of a float": with_sampling(max_new_tokens=2.0),
    "min above max": with_sampling(min_new_tokens=3),
    "seed beyond 64 bits": with_sampling(sampling_seed=2**70),
    "huge stop list": with_sampling(stop=["ab"] * 100_000),
    "huge stop string": with_sampling(stop="ab" * 1_000_000),
    "empty stop string": with_sampling(stop=[""]),
    "stop of numbers": with_sampling(stop=[5]),
    "stop token out of the vocabulary": with_sampling(stop_token_ids=[2**70]),
    "stop tokens of an object": with_sampling(stop_token_ids={"a": 1}),
    "every token stops and none may": with_sampling(stop_token_ids=list(range(VOCAB)), min_new_tokens=1),
    "regular expression that is none": with_sampling(stop_regex="(("),
    "sampling_params of an empty list": {"input_ids": IDS, "sampling_params": []},
    "sampling_params of a list too long": {"input_ids": IDS, "sampling_params": [{}, {}]},
    "sampling_params of a string": {"input_ids": IDS, "sampling_params": "hot"},
    "sampling_params of a number": {"input_ids": IDS, "sampling_params": 5},
    "rid of an object": {"input_ids": IDS, "rid": {}},
    "rids for more prompts than there are": {"input_ids": IDS, "rid": ["a", "b"]},
    "stream of two answers to one prompt": {"input_ids": IDS, "stream": True, "sampling_params": {"n": 2}},
    "stream of a number": {"input_ids": IDS, "stream": 1},
    "logprob_start_len out of range": {"input_ids": IDS, "logprob_start_len": 10**12},
    "logprob_start_len negative": {"input_ids": IDS, "logprob_start_len": -2},
    "logprob_start_len of a list": {"input_ids": IDS, "logprob_start_len": [0]},
    "return_logprob of a string": {"input_ids": IDS, "return_logprob": "yes"},
    "unknown field with a huge name": {"input_ids": IDS, "x" * 1_000_000: 5},
    "unknown adapters": {"input_ids": IDS, "lora_path": ["a"]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_generate_is_a_400_with_words_and_the_engine_serves_on(engine, name):
    status, text = send(engine, "generate", REFUSED[name])
    assert status == 400 and 0 < len(json.loads(text)["error"]["message"]) < 2000
    assert_serves(engine)


ANSWERED = {
    "temperature next to zero": with_sampling(temperature=1e-40),
    "denormal temperature": with_sampling(temperature=5e-324),
    "great temperature": with_sampling(temperature=1e6),
    "top_k above the vocabulary": with_sampling(top_k=2**31 - 1),
    "denormal top_p": with_sampling(top_p=5e-324),
    "no token": with_sampling(max_new_tokens=0),
    "more tokens than there is room": with_sampling(max_new_tokens=10**12),
    "as many tokens as there is room": with_sampling(max_new_tokens=None),
    "least seed": with_sampling(sampling_seed=-(2**63)),
    "every token stops": with_sampling(stop_token_ids=list(range(VOCAB))),
    "stops that never come": with_sampling(stop=["\ud800", "\x00", "x" * 200]),
    "all sampling null": {"input_ids": IDS, "sampling_params": None},
    "samplings of a batch": {
        "input_ids": [[5], [6]],
        "sampling_params": [{"n": 2, "max_new_tokens": 1}, None],
    },
    "the same id twice": {
        "input_ids": [[5], [6]],
        "rid": ["a", "a"],
        "sampling_params": {"max_new_tokens": 1},
    },
    "strange id": {"input_ids": [5], "rid": "\ud800\x00/../" * 100, "sampling_params": {"max_new_tokens": 1}},
}


@pytest.mark.parametrize("name", ANSWERED)
def test_an_odd_generate_is_answered_and_the_engine_serves_on(engine, name):
    status, text = send(engine, "generate", ANSWERED[name])
    assert status == 200, text
    answers = json.loads(text)
    for answer in answers if isinstance(answers, list) else [answers]:
        assert answer["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    assert_serves(engine)


BODIES = {
    "half of an object": b'{"input_ids": [5',
    "nothing but brackets": b"[" * 1_000_000,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep value": b'{"input_ids": ' + b"[" * 900 + b"]" * 900 + b"}",
    "deep sampling_params": b'{"input_ids": [5], "sampling_params": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a number of 10,000 digits": b'{"input_ids": [' + b"9" * 10_000 + b"]}",
    "NaN": b'{"input_ids": [5], "sampling_params": {"temperature": NaN}}',
    "infinity": b'{"input_ids": [5], "sampling_params": {"temperature": Infinity}}',
    "infinity by its digits": b'{"input_ids": [5], "sampling_params": {"temperature": 1e999}}',
    "bytes that are no text": b'{"text": "\xff\xfe"}',
    "a string": b'"abc"',
    "null": b"null",
    "form": b"input_ids=5&text=a",
    "zeros": b"\0" * 1000,
}
OTHER_ENDPOINTS = (
    "abort_request",
    "pause_generation",
    "update_weights_from_disk",
    "update_weights_from_shared_memory",
    "update_weights_from_delta",
    "load_lora_adapter_from_shared_memory",
    "init_weights_update_group",
    "destroy_weights_update_group",
    "update_weights_from_distributed",
    "update_weight_version",
    "weights_checker",
    "release_memory_occupation",
    "resume_memory_occupation",
)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_request_is_a_400_everywhere(engine, name):
    for endpoint in ("generate", *OTHER_ENDPOINTS):
        status, text = send(engine, endpoint, BODIES[name])
        # Of such bodies some are objects, only not what this endpoint reads.
        if (
            name not in ("deep value", "deep sampling_params", "infinity by its digits")
            or endpoint == "generate"
        ):
            assert status == 400, (endpoint, status, text)
        assert status < 500
    run(engine.control.resume())
    run(engine.control.restore())
    assert_serves(engine)


WRONG_CALLS = {
    "a mode that is no text": ("pause_generation", {"mode": ["abort"]}),
    "an id that is no text": ("abort_request", {"rid": ["a"]}),
    "tags of a string": ("release_memory_occupation", {"tags": "weights"}),
    "tags of lists": ("release_memory_occupation", {"tags": [["weights"]]}),
    "tags of objects": ("resume_memory_occupation", {"tags": [{}]}),
    "a version of a number": ("update_weight_version", {"new_version": 5}),
    "an action of a list": ("weights_checker", {"action": ["checksum"]}),
    "compare with nothing": ("weights_checker", {"action": "compare"}),
    "compare with a list": ("weights_checker", {"action": "compare", "manifest": []}),
    "a path with a zero byte": ("update_weights_from_disk", {"model_path": "/tmp/\0"}),
    "a path with half a character": ("update_weights_from_disk", {"model_path": "/tmp/\ud800"}),
    "a path without end": ("update_weights_from_disk", {"model_path": "/" + "a" * 100_000}),
    "a path of a number": ("update_weights_from_disk", {"model_path": 5}),
    "a group of a list": ("destroy_weights_update_group", {"group_name": []}),
    "an unknown group": ("destroy_weights_update_group", {"group_name": "nobody"}),
    "names of lists": (
        "update_weights_from_distributed",
        {"names": [[]], "dtypes": ["float32"], "shapes": [[1]]},
    ),
    "dtypes of lists": ("update_weights_from_distributed", {"names": ["a"], "dtypes": [[]], "shapes": [[1]]}),
    "bucket of an unknown group": (
        "update_weights_from_distributed",
        {"names": ["a"], "dtypes": ["float32"], "shapes": [[2**40]], "group_name": ["x"]},
    ),
    "a port beyond all ports": (
        "init_weights_update_group",
        {
            "group_name": "a",
            "master_address": "127.0.0.1",
            "master_port": 2**40,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        },
    ),
    "adapters of no name": ("load_lora_adapter_from_shared_memory", {"lora_name": "", "manifest": {}}),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_control_call_is_a_400_and_the_engine_serves_on(engine, name):
    status, text = send(engine, *WRONG_CALLS[name])
    assert status == 400, (status, text)
    assert_serves(engine)


def test_ending_a_request_that_is_not_there_is_no_error(engine):
    assert send(engine, "abort_request", {"rid": "nobody"})[0] == 200
    assert_serves(engine)


# -- off the event loop --------------------------------------------------------------------------------------


async def _longest_silence(engine, busy) -> float:
    """The longest that /health took to answer while `busy` ran."""
    longest, task = 0.0, asyncio.ensure_future(busy)
    async with aiohttp.ClientSession() as session:
        while not task.done():
            started = time.monotonic()
            async with session.get(f"{engine.url}/health") as answer:
                assert answer.status == 200
            longest = max(longest, time.monotonic() - started)
            await asyncio.sleep(0.01)
    await task
    return longest


async def _post(engine, endpoint: str, data: bytes, **headers) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{engine.url}/{endpoint}", data=data, headers={"Content-Type": "application/json", **headers}
        ) as answer,
    ):
        return answer.status


def test_a_long_text_is_refused_before_it_is_read(engine):
    body = json.dumps({"text": "a b" * 3_500_000}).encode()
    assert run(_longest_silence(engine, _post(engine, "generate", body))) < 30
    assert_serves(engine)


def test_a_compressed_body_is_refused_unread(engine):
    body = gzip.compress(b" " * (200 << 20), 9)
    started = time.monotonic()
    assert run(_post(engine, "generate", body, **{"Content-Encoding": "gzip"})) == 415
    assert time.monotonic() - started < 60
    assert_serves(engine)


def test_a_manifest_of_very_many_buckets_is_refused_and_nobody_waits_for_it(engine):
    stack, sound = a_manifest(engine, 1)
    with stack:
        bucket = sound["buckets"][0]
        buckets = [
            {**bucket, "segment": f"slime-{i}", "tensors": [{**bucket["tensors"][0], "name": f"t{i}"}]}
            for i in range(50_000)
        ]
        body = json.dumps(
            {**sound, "buckets": buckets, "num_tensors": 50_000, "nbytes": 16 * 50_000}
        ).encode()
        statuses = []

        async def post():
            statuses.append(await _post(engine, "update_weights_from_shared_memory", body))

        assert run(_longest_silence(engine, post())) < 30
    assert statuses == [400]
    assert_serves(engine)


def test_bodies_that_are_half_sent_hold_nobody_up(engine):
    address = urlsplit(engine.url)
    with ExitStack() as stack:
        for _ in range(20):
            half = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            half.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            half.sendall(b"Content-Length: 100\r\n\r\n{")
        assert_serves(engine)
    assert_serves(engine)


# -- whatever else -------------------------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(), st.integers(-3, 300), st.floats(), st.sampled_from([2**31, 2**63, 2**64, -(2**63)])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20))
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner)),
    max_leaves=8,
)
token_ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
sampling_params = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(0, 3)},
    optional={
        name: st.one_of(anything, plausible)
        for name, plausible in {
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0, 1),
            "top_k": st.integers(-1, 200),
            "min_p": st.floats(0, 1),
            "min_new_tokens": st.integers(0, 3),
            "stop": st.lists(st.text(max_size=3), max_size=3),
            "stop_token_ids": st.lists(st.integers(0, VOCAB), max_size=3),
            "ignore_eos": st.booleans(),
            "sampling_seed": st.integers(),
            "n": st.integers(0, 3),
            "repetition_penalty": st.floats(0, 2),
        }.items()
    },
)
generate_bodies = st.fixed_dictionaries(
    {},
    optional={
        "input_ids": st.one_of(token_ids, st.lists(token_ids, max_size=3), anything),
        "text": st.one_of(st.text(max_size=40), anything),
        "sampling_params": st.one_of(sampling_params, st.lists(sampling_params, max_size=3), anything),
        "return_logprob": st.one_of(st.booleans(), anything),
        "logprob_start_len": st.one_of(st.integers(-1, 1), anything),
        "stream": st.one_of(st.booleans(), anything),
        "rid": st.one_of(st.text(), anything),
        "top_logprobs_num": anything,
        "lora_path": anything,
    },
)
control_bodies = st.dictionaries(
    st.sampled_from(
        (
            *(
                "mode",
                "rid",
                "tags",
                "model_path",
                "weight_version",
                "new_version",
                "action",
                "manifest",
                "version",
            ),
            *("buckets", "num_tensors", "nbytes", "group_name", "names", "dtypes", "shapes", "lora_name"),
            *("config_dict", "abort_all"),
        )
    ),
    anything,
    max_size=6,
)
FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@FUZZ
@given(body=generate_bodies)
def test_no_body_of_generate_is_a_500_or_ends_the_engine(engine, body):
    status, text = send(engine, "generate", json.dumps(body).encode())
    assert status in (200, 400), (status, text)
    assert engine.process.poll() is None


@FUZZ
@given(endpoint=st.sampled_from(OTHER_ENDPOINTS), body=control_bodies)
def test_no_body_of_a_control_call_is_a_500_or_ends_the_engine(engine, endpoint, body):
    status, text = send(engine, endpoint, json.dumps(body).encode())
    assert status in (200, 400), (endpoint, status, text)
    assert engine.process.poll() is None


def test_the_engine_still_serves_after_all_that(engine):
    run(engine.control.restore())
    run(engine.control.resume())
    run(engine.control.update_from_disk(str(engine.model), f"run:{secrets.token_hex(2)}"))
    assert_serves(engine)
