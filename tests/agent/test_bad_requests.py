"""Bodies that the schemas of the real SDKs forbid: each is a 400 in the API's own error JSON."""

import asyncio
import json

import aiohttp
import pytest
from agent_world import agent_world, check_exact

from slime.utils.types import Sample

KEY = {"Authorization": "Bearer key-1"}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
ITEM = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


def chat(*messages, **more):
    return {"model": "m", "messages": list(messages), **more}


def anthropic(*messages, **more):
    return {"model": "m", "max_tokens": 9, "messages": list(messages), **more}


def responses(*items, **more):
    return {"model": "m", "input": list(items), **more}


def answered(**message):
    return {"role": "assistant", "content": "", **message}


def used(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def shown(*blocks):
    return {"role": "user", "content": list(blocks)}


BAD = {
    "chat": {
        "messages missing": {"model": "m"},
        "messages null": {"model": "m", "messages": None},
        "a message that is text": chat("hello"),
        "a role that is a number": chat({"role": 5, "content": "x"}),
        "a role that is a list": chat({"role": ["user"], "content": "x"}),
        "no content": chat({"role": "user"}),
        "content that is an object": chat({"role": "user", "content": {"text": "x"}}),
        "a part that is text": chat(shown("x")),
        "a part without text": chat(shown({"type": "text"})),
        "a part whose text is a number": chat(shown({"type": "text", "text": 5})),
        "a part whose type is a list": chat(shown({"type": ["text"], "text": "x"})),
        "an image without an address": chat(shown({"type": "image_url"})),
        "an image whose address is text": chat(shown({"type": "image_url", "image_url": "data:,"})),
        "sound": chat(shown({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})),
        "a file": chat(shown({"type": "file", "file": {"file_id": "f"}})),
        "calls that are no list": chat(HELLO, answered(tool_calls="x"), HELLO),
        "a call that is text": chat(HELLO, answered(tool_calls=["x"]), HELLO),
        "a call without a function": chat(HELLO, answered(tool_calls=[{"id": "c"}]), HELLO),
        "a call without an id": chat(HELLO, answered(tool_calls=[{**CALL, "id": None}]), HELLO),
        "a call whose name is a number": chat(
            HELLO, answered(tool_calls=[{**CALL, "function": {"name": 5, "arguments": "{}"}}]), HELLO
        ),
        "arguments that are a list": chat(
            HELLO, answered(tool_calls=[{**CALL, "function": {"name": "a", "arguments": []}}]), HELLO
        ),
        "a call without a result": chat(HELLO, answered(tool_calls=[CALL]), HELLO),
        "a result without an id": chat(HELLO, answered(tool_calls=[CALL]), {"role": "tool", "content": "x"}),
        "a result of another call": chat(
            HELLO, answered(tool_calls=[CALL]), {"role": "tool", "tool_call_id": "c2", "content": "x"}
        ),
        "a result twice": chat(
            HELLO,
            answered(tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "c1", "content": "x"},
            {"role": "tool", "tool_call_id": "c1", "content": "x"},
        ),
        "tools of another type": chat(HELLO, tools="x"),
        "a tool that is text": chat(HELLO, tools=["x"]),
        "a tool of an unknown type": chat(HELLO, tools=[{"type": "magic"}]),
        "a function that is text": chat(HELLO, tools=[{"type": "function", "function": "x"}]),
        "a function without a name": chat(HELLO, tools=[{"type": "function", "function": {"name": ""}}]),
        "a name in two words": chat(HELLO, tools=[{"type": "function", "function": {"name": "a b"}}]),
        "parameters that are text": chat(
            HELLO, tools=[{"type": "function", "function": {"name": "a", "parameters": "x"}}]
        ),
        "a description that is a number": chat(
            HELLO, tools=[{"type": "function", "function": {"name": "a", "description": 5}}]
        ),
        "a choice that is a number": chat(HELLO, tool_choice=5),
        "a choice of a function that is not given": chat(
            HELLO, tool_choice={"type": "function", "function": {"name": "look"}}
        ),
        "a seed that is text": chat(HELLO, seed="x"),
        "a seed beyond 64 bits": chat(HELLO, seed=2**70),
        "max_tokens that is text": chat(HELLO, max_tokens="9"),
        "max_completion_tokens that is a half": chat(HELLO, max_completion_tokens=1.5),
        "a stop that is a number": chat(HELLO, stop=5),
        "a stop with a number in it": chat(HELLO, stop=["a", 5]),
        "a stop without a letter": chat(HELLO, stop=""),
        "top_p above one": chat(HELLO, top_p=1.5),
        "top_p that is a list": chat(HELLO, top_p=[0.5]),
        "a penalty out of range": chat(HELLO, presence_penalty=3),
        "a temperature that is no number": chat(HELLO, temperature=float("nan")),
        "logprobs that are text": chat(HELLO, logprobs="yes"),
        "top_logprobs": chat(HELLO, logprobs=True, top_logprobs=3),
        "stream options that are a list": chat(HELLO, stream=True, stream_options=[1]),
        "a format that is text": chat(HELLO, response_format="json"),
        "a format without its schema": chat(HELLO, response_format={"type": "json_schema"}),
        "a forced call without tools": chat(HELLO, tool_choice="required"),
        "n of zero": chat(HELLO, n=0),
        "a model that is a list": chat(HELLO, model=["m"]),
    },
    "responses": {
        "input missing": {"model": "m"},
        "input that is an object": {"model": "m", "input": {"role": "user"}},
        "an item that is text": responses("hello"),
        "an item of an unknown type": responses({"type": "smell"}),
        "a role that is none": responses({"role": "tool", "content": "x"}),
        "content that is a number": responses({"role": "user", "content": 5}),
        "a part that is text": responses(shown("x")),
        "a part without text": responses(shown({"type": "input_text"})),
        "an image by a file": responses(shown({"type": "input_image", "file_id": "f"})),
        "a file": responses(shown({"type": "input_file", "file_id": "f"})),
        "a call without a name": responses(HELLO, {**ITEM, "name": None}),
        "a call without an id": responses(HELLO, {**ITEM, "call_id": None}),
        "arguments that are an object": responses(HELLO, {**ITEM, "arguments": {}}),
        "a call without a result": responses(HELLO, ITEM, HELLO),
        "a result without a call": responses(
            HELLO, {"type": "function_call_output", "call_id": "x", "output": "y"}
        ),
        "a result that is a number": responses(
            HELLO, ITEM, {"type": "function_call_output", "call_id": "c1", "output": 5}
        ),
        "instructions that are a list": responses(HELLO, instructions=["x"]),
        "text that is text": responses(HELLO, text="plain"),
        "a format without its schema": responses(HELLO, text={"format": {"type": "json_schema"}}),
        "a schema that is text": responses(HELLO, text={"format": {"type": "json_schema", "schema": "x"}}),
        "a format that is text": responses(HELLO, text={"format": "json"}),
        "an earlier response": responses(HELLO, previous_response_id="resp_1"),
        "tools of another type": responses(HELLO, tools={"a": 1}),
        "a tool that is text": responses(HELLO, tools=["x"]),
        "a function without a name": responses(HELLO, tools=[{"type": "function"}]),
        "a choice of a function that is not given": responses(
            HELLO, tool_choice={"type": "function", "name": "look"}
        ),
        "max_output_tokens of zero": responses(HELLO, max_output_tokens=0),
        "a temperature that is text": responses(HELLO, temperature="hot"),
        "a stream that is a number": responses(HELLO, stream=1),
        "a model that is a number": responses(HELLO, model=5),
    },
    "anthropic": {
        "messages missing": {"model": "m", "max_tokens": 9},
        "max_tokens missing": {"model": "m", "messages": [HELLO]},
        "max_tokens that is text": anthropic(HELLO, max_tokens="9"),
        "a message that is text": anthropic("hello"),
        "a role that is none": anthropic({"role": "tool", "content": "x"}),
        "no content": anthropic({"role": "user"}),
        "content that is a number": anthropic({"role": "user", "content": 5}),
        "a block that is text": anthropic(shown("x")),
        "a block of an unknown type": anthropic(shown({"type": "smell"})),
        "a block without text": anthropic(shown({"type": "text"})),
        "a document": anthropic(shown({"type": "document", "source": {"type": "text", "data": "x"}})),
        "an image without a source": anthropic(shown({"type": "image"})),
        "an image by a file": anthropic(shown({"type": "image", "source": {"type": "file", "file_id": "f"}})),
        "an image of another kind": anthropic(
            shown({"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": ""}})
        ),
        "a use without an id": anthropic(HELLO, used({**USE, "id": None}), HELLO),
        "a use whose input is text": anthropic(HELLO, used({**USE, "input": "{}"}), HELLO),
        "a use without a result": anthropic(HELLO, used(USE), HELLO),
        "a result without a use": anthropic(
            HELLO, shown({"type": "tool_result", "tool_use_id": "x", "content": "y"})
        ),
        "a result without an id": anthropic(HELLO, used(USE), shown({"type": "tool_result", "content": "y"})),
        "a result that is a number": anthropic(
            HELLO, used(USE), shown({"type": "tool_result", "tool_use_id": "t1", "content": 5})
        ),
        "a system message that is a number": anthropic(HELLO, system=5),
        "a system block of an unknown type": anthropic(HELLO, system=[{"type": "image"}]),
        "tools of another type": anthropic(HELLO, tools={"a": 1}),
        "a tool without a schema": anthropic(HELLO, tools=[{"name": "a"}]),
        "a tool without a name": anthropic(HELLO, tools=[{"input_schema": {"type": "object"}}]),
        "a tool of an unknown type": anthropic(HELLO, tools=[{"type": "magic", "name": "a"}]),
        "a tool whose name has no letter": anthropic(HELLO, tools=[{"name": "", "input_schema": {}}]),
        "a stop sequence without a letter": anthropic(HELLO, stop_sequences=["x", ""]),
        "a choice that is text": anthropic(HELLO, tool_choice="auto"),
        "a forced choice without tools": anthropic(HELLO, tool_choice={"type": "any"}),
        "a format without its schema": anthropic(HELLO, output_config={"format": {"type": "json_schema"}}),
        "stop sequences that are text": anthropic(HELLO, stop_sequences="x"),
        "a stop sequence that is a number": anthropic(HELLO, stop_sequences=[5]),
        "a temperature above one": anthropic(HELLO, temperature=1.5),
        "top_k that is a half": anthropic(HELLO, top_k=0.5),
        "a stream that is text": anthropic(HELLO, stream="yes"),
        "a model that is a list": anthropic(HELLO, model=["m"]),
    },
}


@pytest.mark.parametrize("api", PATHS)
def test_what_the_schema_forbids_is_refused_and_the_session_goes_on(api):
    with agent_world(["one"]) as world:

        async def ask_all():
            wrong = {}
            async with aiohttp.ClientSession(headers=KEY) as http:
                for name, body in BAD[api].items():
                    async with http.post(world.url + PATHS[api], data=json.dumps(body)) as answer:
                        told = await answer.text()
                    error = json.loads(told)["error"] if answer.status == 400 else {}
                    if error.get("type") != "invalid_request_error" or not error.get("message"):
                        wrong[name] = (answer.status, told[:200])
                good = {"chat": chat, "responses": responses, "anthropic": anthropic}[api](HELLO)
                async with http.post(world.url + PATHS[api], json=good) as answer:
                    assert answer.status == 200, await answer.text()
            return wrong

        wrong = asyncio.run(ask_all())
        assert not wrong, wrong
        assert len(world.engine.requests) == 1, "nothing of these reaches the engine"
        samples = asyncio.run(world.adapter.finish_session("key-1", base_sample=Sample(index=3)))
        check_exact(world, samples, num_turns=1)


HALF = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": "\\ud800"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "r"}
UNREADABLE = {
    "not packed as it says": (b"x", {"Content-Encoding": "gzip"}),
    "half of a surrogate pair": (json.dumps(chat({"role": "user", "content": "\ud83d"})).encode(), {}),
    "half of one, in bytes": (
        json.dumps(chat(HELLO)).encode().replace(b"hello", b"\xed\xa0\x80"),
        {},
    ),
    "half of one in arguments": (json.dumps(chat(HELLO, answered(tool_calls=[HALF]), RESULT)).encode(), {}),
    "an integer of 6000 digits": (b'{"model": "m", "max_tokens": ' + b"9" * 6000 + b"}", {}),
    "lists within lists": (b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}),
}


def test_a_body_that_cannot_be_read_is_a_mistake_of_the_client():
    async def ask(url, raw, headers):
        async with (
            aiohttp.ClientSession(headers={**KEY, **headers}) as http,
            http.post(url + PATHS["chat"], data=raw) as answer,
        ):
            return answer.status, await answer.text()

    with agent_world(["one"]) as world:
        for name, (raw, headers) in UNREADABLE.items():
            status, told = asyncio.run(ask(world.url, raw, headers))
            assert status == 400 and json.loads(told)["error"]["type"] == "invalid_request_error", (
                name,
                told,
            )
        assert asyncio.run(ask(world.url, json.dumps(chat(HELLO)), {}))[0] == 200
        assert len(world.engine.requests) == 1
