"""A plain client of the adapters' endpoints: bodies of each API, a question, the events of a stream."""

import asyncio
import json

import aiohttp

from slime.utils.types import Sample

TOOL = {
    "name": "look",
    "description": "d",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CHAT_TOOL = {"type": "function", "function": TOOL}
RESPONSES_TOOL = {"type": "function", **TOOL}
ANTHROPIC_TOOL = {"name": "look", "input_schema": TOOL["parameters"]}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
KEY = {"Authorization": "Bearer key-1"}
HELLO = {"role": "user", "content": "hello"}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}


def body_of(api, messages, **more):
    if api == "responses":
        return {"model": "m", "input": messages, **more}
    return {"model": "m", "messages": messages, "max_tokens": 300, **more}


async def post(world, api, body, headers=KEY, raw=None):
    async with (
        aiohttp.ClientSession() as http,
        http.post(world.url + PATHS[api], data=raw or json.dumps(body), headers=headers) as answer,
    ):
        return answer.status, await answer.text(), answer.headers


async def ask(world, api, messages, **more):
    status, text, _ = await post(world, api, body_of(api, messages, **more))
    assert status == 200, text
    return json.loads(text)


def events_of(text):
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def finish(world, sid="key-1", **options):
    return asyncio.run(world.adapter.finish_session(sid, base_sample=Sample(index=3), reward=1.0, **options))
