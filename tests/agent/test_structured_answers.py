"""JSON schemas and forced calls: clients of each API ask, and an engine with grammars follows."""

import asyncio
import json

import pytest
from adapter_client import (
    ANTHROPIC_TOOL,
    CHAT_TOOL,
    HELLO,
    RESPONSES_TOOL,
    TOOL,
    ask,
    body_of,
    events_of,
    finish,
    post,
)
from agent_world import agent_world, check_exact
from engine_under_test import address_of
from tiny_model import CHAT_TEMPLATE, make_tiny_model

from slime.agent.adapters import AgentAdapter
from slime.agent.session import Budget
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["large", "small"]}, "even": {"type": "boolean"}},
    "required": ["size", "even"],
    "additionalProperties": False,
}
NESTED = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA, "strict": True}}
FLAT = {"type": "json_schema", "name": "size", "schema": SCHEMA}
FORMATS = {
    "chat": {"response_format": NESTED},
    "responses": {"text": {"format": FLAT}},
    "anthropic": {"output_config": {"format": FLAT}},
}
OTHER = {**TOOL, "name": "leave"}
ANY_CALL = {
    "chat": {"tools": [CHAT_TOOL, {"type": "function", "function": OTHER}], "tool_choice": "required"},
    "responses": {"tools": [RESPONSES_TOOL, {"type": "function", **OTHER}], "tool_choice": "required"},
    "anthropic": {
        "tools": [ANTHROPIC_TOOL, {**ANTHROPIC_TOOL, "name": "leave"}],
        "tool_choice": {"type": "any"},
    },
}
NAMED = {
    "chat": {"type": "function", "function": {"name": "look"}},
    "responses": {"type": "function", "name": "look"},
    "anthropic": {"type": "tool", "name": "look"},
}
VALUE = '{"size": "large", "even": true}'
USE = '{"name": "look", "arguments": {"at": "<tool_call>"}}'


def text_of(api, answer):
    match api:
        case "chat":
            return answer["choices"][0]["message"]["content"]
        case "responses":
            [item] = answer["output"]
            return item["content"][0]["text"]
    [block] = answer["content"]
    return block["text"]


def call_of(api, answer):
    """The name and the arguments of the only call of an answer."""
    match api:
        case "chat":
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            [call] = answer["choices"][0]["message"]["tool_calls"]
            return call["function"]["name"], json.loads(call["function"]["arguments"])
        case "responses":
            [item] = answer["output"]
            return item["name"], json.loads(item["arguments"])
    assert answer["stop_reason"] == "tool_use"
    [block] = answer["content"]
    return block["name"], block["input"]


@pytest.mark.parametrize("api", FORMATS)
def test_a_schema_reaches_the_engine_and_the_response_is_text(api):
    with agent_world([VALUE]) as world:
        answer = asyncio.run(ask(world, api, [HELLO], **FORMATS[api]))
        assert json.loads(text_of(api, answer)) == {"size": "large", "even": True}
        [request] = world.engine.requests
        assert json.loads(request["sampling_params"]["json_schema"]) == SCHEMA
        check_exact(world, finish(world), num_turns=1)


@pytest.mark.parametrize("api", ANY_CALL)
def test_a_forced_call_is_a_call_in_the_form_of_each_api(api):
    with agent_world([USE]) as world:

        async def episode():
            answers = [await ask(world, api, [HELLO], **ANY_CALL[api])]
            answers.append(await ask(world, api, [HELLO], **{**ANY_CALL[api], "tool_choice": NAMED[api]}))
            return answers

        answers = asyncio.run(episode())
        assert [call_of(api, answer) for answer in answers] == [("look", {"at": "<tool_call>"})] * 2
        schemas = [json.loads(one["sampling_params"]["json_schema"]) for one in world.engine.requests]
        names = [[kind["properties"]["name"]["const"] for kind in schema["anyOf"]] for schema in schemas]
        assert names == [["look", "leave"], ["look"]]
        assert schemas[0]["anyOf"][0]["properties"]["arguments"] == TOOL["parameters"]
        check_exact(world, finish(world), num_turns=2)


def test_a_conversation_continues_behind_a_forced_call_in_the_tokens_that_were_drawn():
    with agent_world([USE, "it is there"]) as world:

        async def episode():
            first = await ask(world, "chat", [HELLO], tools=[CHAT_TOOL], tool_choice="required")
            said = first["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a door"}
            return await ask(world, "chat", [HELLO, said, result], tools=[CHAT_TOOL])

        assert text_of("chat", asyncio.run(episode())) == "it is there"
        [sample] = finish(world)
        check_exact(world, [sample], num_turns=2)
        assert "json_schema" not in world.engine.requests[1]["sampling_params"]


def test_a_forced_call_that_the_limit_of_tokens_ends_is_text_and_marked():
    with agent_world([USE]) as world:
        body = {**body_of("chat", [HELLO], tools=[CHAT_TOOL], tool_choice="required"), "max_tokens": 5}
        status, text, _ = asyncio.run(post(world, "chat", body))
        choice = json.loads(text)["choices"][0]
        assert status == 200 and choice["finish_reason"] == "length"
        assert choice["message"]["content"] == USE[:5] and not choice["message"].get("tool_calls")
        [sample] = finish(world)
        assert sample.metadata["agent"]["tool_errors"] == 1


def test_a_stream_of_a_forced_call_has_its_call():
    with agent_world([USE]) as world:
        body = body_of("chat", [HELLO], tools=[CHAT_TOOL], tool_choice="required", stream=True)
        _, text, _ = asyncio.run(post(world, "chat", body))
        calls = [c for e in events_of(text) for x in e["choices"] for c in x["delta"].get("tool_calls") or ()]
        assert calls[0]["function"]["name"] == "look"


async def asks_real(url, api, **more):
    class world:
        pass

    world.url = url
    return await post(world, api, body_of(api, [HELLO], **more))


def adapter_before(model, url):
    adapter = AgentAdapter(load_tokenizer(str(model)), url).start()
    adapter.open_session("key-1", {"temperature": 1.0}, budget=Budget(max_new_tokens=400), seed=5)
    return adapter


def test_the_embedded_engine_has_no_grammars_and_says_so(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    with address_of("embedded", model, tmp_path / "engine.log") as url:
        adapter = adapter_before(model, url)
        try:
            for api, asked in FORMATS.items():
                status, text, _ = asyncio.run(asks_real(adapter.url, api, **asked))
                error = json.loads(text)["error"]
                assert status == 400 and error["type"] == "invalid_request_error"
                assert "json_schema is not supported by the embedded engine" in error["message"]
        finally:
            adapter.stop()


@pytest.mark.sglang
def test_sglang_follows_schemas_and_forced_calls(tmp_path):
    """A model with random weights writes what the schema asks for, in every API."""
    model = make_tiny_model(tmp_path / "model")
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    (model / "chat_template.jinja").write_text(tools + CHAT_TEMPLATE)
    with address_of("sglang", model, tmp_path / "engine.log") as url:
        adapter = adapter_before(model, url)
        try:
            for api, asked in FORMATS.items():
                status, text, _ = asyncio.run(asks_real(adapter.url, api, **asked))
                assert status == 200, text
                value = json.loads(text_of(api, json.loads(text)))
                assert set(value) == {"size", "even"} and value["size"] in ("large", "small")
            enumerated = {**TOOL, "parameters": SCHEMA}
            more = {"tools": [{"type": "function", "function": enumerated}], "tool_choice": "required"}
            status, text, _ = asyncio.run(asks_real(adapter.url, "chat", **more))
            name, arguments = call_of("chat", json.loads(text))
            assert name == "look" and set(arguments) == {"size", "even"}
            samples = asyncio.run(adapter.finish_session("key-1", base_sample=Sample(index=1)))
            assert sum(len(sample.metadata["turns"]) for sample in samples) >= 4
        finally:
            adapter.stop()
