"""Requests with one thing changed: whatever the real SDKs' own types forbid is a 400, and nothing is a 500.

`make test-agents` installs the SDKs and runs this file.
"""

import asyncio
import copy
import json
import subprocess
from pathlib import Path

import aiohttp
import pytest
from agent_world import agent_world, check_exact

from slime.utils.types import Sample

HERE = Path(__file__).parent
SDKS = HERE.parents[1] / ".venv-agents" / "bin" / "python"
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
OPENAI = {
    "model": "m", "tool_choice": "auto", "temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": True,
    "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
}  # fmt: skip
WHOLE = {
    "chat": {
        **OPENAI,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "bob"},
            {
                "role": "assistant",
                "content": "y",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]},
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "z"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "look", "description": "d", "parameters": SCHEMA, "strict": False},
            }
        ],
        "seed": 3,
        "stop": ["E"],
        "max_tokens": 5,
        "max_completion_tokens": 7,
        "n": 1,
        "logprobs": True,
        "top_logprobs": 0,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "stream": False,
        "response_format": {"type": "text"},
        "logit_bias": {},
        "reasoning_effort": "low",
        "modalities": ["text"],
    },
    "responses": {
        **OPENAI,
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "t"}]},
            {
                "type": "message",
                "id": "m",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "y", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "z"},
        ],
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}],
        "max_output_tokens": 5,
        "stream": False,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "disabled",
        "prompt_cache_key": "k",
    },
    "anthropic": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "y"},
                    {"type": "tool_use", "id": "t", "name": "look", "input": {"at": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [{"type": "text", "text": "r"}],
                        "is_error": False,
                    },
                    {"type": "text", "text": "z"},
                ],
            },
        ],
        "tools": [{"name": "look", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop_sequences": ["E"],
        "stream": False,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "service_tier": "auto",
    },
}
ODD = (True, -1, 0, 1.5, 10**30, "", "odd", "\ud800", [], ["x"], [None], {}, {"a": 1}, [[]])
GONE = object()
# Fields that ask for nothing here: the endpoint never reads them, whatever they hold.
UNREAD = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "service_tier", "store", "user",
    "reasoning_effort", "messages.1.name", "tools.0.function.strict",
    "include", "reasoning", "text.verbosity", "truncation", "input.1.id", "input.2.id", "input.2.status",
    "input.2.content.0.annotations", "tools.0.strict",
    "system.0.cache_control", "thinking", "messages.1.content.0.signature", "messages.2.content.0.is_error",
}  # fmt: skip
# Codex sends a reasoning item without a summary, and text alone for an answer.
TAKEN = [("input.1.summary", GONE), ("tools.0.parameters", GONE), ("input.2.content", "odd")]


def places(value, at=()):
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from places(one, (*at, name))


def changed(body, at, new):
    body = holder = copy.deepcopy(body)
    for name in at[:-1]:
        holder = holder[name]
    if new is GONE:
        del holder[at[-1]]
    else:
        holder[at[-1]] = new
    return body


def bodies(api):
    for at in places(WHOLE[api]):
        for new in (*ODD, GONE):
            yield ".".join(map(str, at)), new, changed(WHOLE[api], at, new)


def message_of(told):
    return json.loads(told)["error"]["message"]


def is_taken(where, new):
    """What the types forbid and the endpoint takes, on purpose."""
    unread = any(where == name or where.startswith(f"{name}.") for name in UNREAD)
    # The types know each type of a tool, and grow with every release: here any word is taken.
    return unread or (where, new) in TAKEN or (where == "tools.0.type" and isinstance(new, str))


@pytest.mark.agents
@pytest.mark.parametrize("api", WHOLE)
def test_what_the_types_of_the_sdk_forbid_is_refused(api):
    if not SDKS.exists():
        pytest.skip("the SDKs are not installed: `make test-agents` does that")
    every = list(bodies(api))
    lines = "".join(json.dumps([api, body]) + "\n" for _, _, body in every)
    said = subprocess.run(
        [SDKS, HERE / "clients" / "schema_of_sdks.py"],
        input=lines,
        capture_output=True,
        text=True,
        check=True,
    )
    forbidden = [line == "1" for line in said.stdout.split()]
    assert len(forbidden) == len(every) and sum(forbidden) > 500

    async def ask(world):
        wrong = []
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer key-1"}) as http:
            for (where, new, body), bad in zip(every, forbidden, strict=True):
                async with http.post(world.url + PATHS[api], data=json.dumps(body)) as answer:
                    told = await answer.text()
                right = (400,) if bad and not is_taken(where, new) else (200, 400)
                if answer.status not in right or (answer.status == 400 and not message_of(told)):
                    wrong.append((where, new, answer.status, told))
            async with http.post(world.url + PATHS[api], json=WHOLE[api]) as answer:
                assert answer.status == 200, await answer.text()
        return wrong

    with agent_world(lambda prompt: "one") as world:
        wrong = asyncio.run(ask(world))
        assert not wrong, wrong[:20]
        samples = asyncio.run(world.adapter.finish_session("key-1", base_sample=Sample(index=3)))
        check_exact(world, samples)
