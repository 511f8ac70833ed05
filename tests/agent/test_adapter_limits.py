"""What the endpoints refuse, limit and outlive, over real HTTP: keys, budgets, bodies, engines that fail."""

import asyncio
import json

import aiohttp
import pytest
from adapter_client import CHAT_TOOL, HELLO, KEY, PATHS, ask, body_of, finish, post
from agent_world import agent_world, check_exact

from slime.agent.session import Budget
from slime.utils.types import Sample


def test_keys_route_and_an_unknown_one_is_refused_in_the_words_of_each_api():
    with agent_world(["one"], sid=None) as world:
        world.adapter.open_session("a")
        world.adapter.open_session("b")
        with pytest.raises(ValueError, match="open already"):
            world.adapter.open_session("b")

        async def episode():
            for key in ("a", "b", "b"):
                status, _, _ = await post(
                    world, "chat", body_of("chat", [HELLO]), {"Authorization": f"Bearer {key}"}
                )
                assert status == 200
            assert (await post(world, "chat", body_of("chat", [HELLO]), {"x-api-key": "a"}))[0] == 200
            status, text, _ = await post(
                world, "chat", body_of("chat", [HELLO]), {"Authorization": "Bearer x"}
            )
            assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"
            status, text, _ = await post(
                world, "anthropic", body_of("anthropic", [HELLO]), {"x-api-key": "x"}
            )
            assert status == 401 and json.loads(text)["error"]["type"] == "authentication_error"
            assert (await post(world, "chat", body_of("chat", [HELLO]), {}))[0] == 401

        asyncio.run(episode())
        assert [len(world.adapter.session(s).turns) for s in "ab"] == [2, 2]
        finish(world, "a")
        status, text, _ = asyncio.run(
            post(world, "chat", body_of("chat", [HELLO]), {"Authorization": "Bearer a"})
        )
        assert status == 503 and "over" in text


def test_budgets_answer_as_the_real_endpoints_do():
    with agent_world(["one"], sid=None) as world:
        world.adapter.open_session("turns", budget=Budget(max_turns=1))
        world.adapter.open_session("context", max_context_tokens=20)
        world.adapter.open_session("tokens", budget=Budget(max_sampled_tokens=2))

        async def call(key, api="chat", **more):
            return await post(world, api, body_of(api, [HELLO], **more), {"Authorization": f"Bearer {key}"})

        async def episode():
            assert (await call("turns"))[0] == 200
            status, text, headers = await call("turns")
            assert status == 429 and json.loads(text)["error"]["code"] == "insufficient_quota"
            assert headers["x-should-retry"] == "false"
            status, text, _ = await call("context")
            assert status == 400 and json.loads(text)["error"]["code"] == "context_length_exceeded"
            status, text, _ = await call("context", "anthropic")
            told = json.loads(text)["error"]
            assert status == 400 and told["message"].startswith("prompt is too long:")
            assert (await call("tokens"))[0] == 200 and (await call("tokens"))[0] == 429

        asyncio.run(episode())
        (sample,) = finish(world, "turns")
        assert sample.metadata["session"]["outcome"] == "turn_budget"
        (silent,) = finish(world, "context")
        assert silent.response_length == 0 and silent.metadata["session"]["outcome"] == "context"
        assert "the policy generated nothing (prompt is too long" in silent.reward_failure.reason
        (cut,) = finish(world, "tokens")
        assert cut.response_length == 2


def test_max_tokens_stop_strings_and_sampling_reach_the_engine():
    with agent_world(["one two three"]) as world:

        async def episode():
            body = body_of("chat", [HELLO], temperature=0.5, top_p=0.9, seed=7, stop="END")
            body["max_tokens"] = 3
            status, text, _ = await post(world, "chat", body)
            answer = json.loads(text)
            assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
            body = body_of("anthropic", [HELLO], stop_sequences=["END"])
            body["max_tokens"] = 3
            assert json.loads((await post(world, "anthropic", body))[1])["stop_reason"] == "max_tokens"

        asyncio.run(episode())
        params = world.engine.requests[0]["sampling_params"]
        assert params["temperature"] == 0.5 and params["sampling_seed"] == 7 and params["stop"] == ["END"]
        assert params["max_new_tokens"] == 3 and params["no_stop_trim"]


BAD = {
    "not json": (None, b"{"),
    "a list": (None, b"[]"),
    "no messages": ({"model": "m", "max_tokens": 3}, None),
    "messages of another type": ({"messages": "hi", "max_tokens": 3, "input": 5}, None),
    "no message at all": ({"messages": [], "input": [], "max_tokens": 3}, None),
    "a role that is none": (body_of("chat", [{"role": "robot", "content": "x"}]), None),
    "content that is a number": (body_of("chat", [{"role": "user", "content": 5}]), None),
    "a part of an unknown kind": (body_of("chat", [{"role": "user", "content": [{"type": "smell"}]}]), None),
    "temperature that is text": (body_of("chat", [HELLO], temperature="hot"), None),
    "temperature out of range": (body_of("chat", [HELLO], temperature=9), None),
    "max_tokens of zero": ({"messages": [HELLO], "max_tokens": 0, "max_output_tokens": 0}, None),
    "stream that is text": (body_of("chat", [HELLO], stream="yes"), None),
    "tools that are no list": (body_of("chat", [HELLO], tools={"a": 1}), None),
    "a tool without a name": (body_of("chat", [HELLO], tools=[{"type": "function", "function": {}}]), None),
    "a result without a call": (
        body_of("chat", [HELLO, {"role": "tool", "tool_call_id": "x", "content": "r"}]),
        None,
    ),
    "an answer at the end": (body_of("chat", [HELLO, {"role": "assistant", "content": "x"}]), None),
    "several answers at once": (body_of("chat", [HELLO], n=2), None),
    "a choice that is none": (body_of("chat", [HELLO], tools=[CHAT_TOOL], tool_choice="now"), None),
}


@pytest.mark.parametrize("api", PATHS)
def test_bodies_that_the_schema_forbids_are_refused_in_its_error_json(api):
    with agent_world(["one"]) as world:

        async def episode():
            for name, (body, raw) in BAD.items():
                body = dict(body or {})
                if api == "responses" and "messages" in body:
                    body = {"input": body.pop("messages"), **body}
                if api != "chat" and name == "several answers at once":
                    continue  # these have no such field
                status, text, _ = await post(world, api, body, KEY, raw)
                assert status == 400, (name, status, text)
                error = json.loads(text)["error"]
                assert error["type"] == "invalid_request_error" and error["message"], name
            # The session is as it was.
            assert (await post(world, api, body_of(api, [HELLO])))[0] == 200

        asyncio.run(episode())
        check_exact(world, finish(world), num_turns=1)


def test_a_body_over_the_limit_is_refused():
    with agent_world(["one"], max_body_bytes=1000) as world:
        body = body_of("chat", [{"role": "user", "content": "x" * 2000}])
        status, text, _ = asyncio.run(post(world, "chat", body))
        assert status == 413 and "1000 bytes" in json.loads(text)["error"]["message"]
        status, text, _ = asyncio.run(post(world, "anthropic", body))
        assert json.loads(text)["error"]["type"] == "request_too_large"


def test_tools_for_a_template_without_a_place_for_them_are_refused():
    with agent_world(["one"], family="smollm2") as world:
        body = body_of("chat", [HELLO], tools=[CHAT_TOOL])
        status, text, _ = asyncio.run(post(world, "chat", body))
        assert status == 400 and "no place for tools" in text


def test_an_engine_that_fails_is_told_with_a_status_and_nothing_is_recorded():
    with agent_world([400, 400, "fine"]) as world:
        for stream in (False, True):
            status, text, _ = asyncio.run(post(world, "chat", body_of("chat", [HELLO], stream=stream)))
            assert status == 400 and "scripted 400" in text
        asyncio.run(ask(world, "chat", [HELLO]))
        check_exact(world, finish(world), num_turns=1)


def test_shutting_a_session_down_ends_its_requests():
    with agent_world([{"hold": True}]) as world:

        async def episode():
            request = asyncio.ensure_future(post(world, "chat", body_of("chat", [HELLO])))
            while not world.engine.running:
                await asyncio.sleep(0.01)
            samples = await world.adapter.finish_session(
                "key-1", base_sample=Sample(index=1), wait_timeout=0.1
            )
            assert [s.response_length for s in samples] == [0] and samples[0].reward is None
            assert "no request was made" in samples[0].reward_failure.reason
            await asyncio.gather(request, return_exceptions=True)
            while not world.engine.aborts:
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(episode(), 60))


def test_health_models_and_unknown_paths():
    with agent_world(["one"]) as world:

        async def episode():
            async with aiohttp.ClientSession() as http:
                async with http.get(world.url + "/healthz") as answer:
                    assert (await answer.json())["status"] == "ok"
                async with http.get(world.url + "/v1/models") as answer:
                    assert (await answer.json())["data"][0]["id"] == "policy"
                async with http.get(world.url + "/v1/nothing") as answer:
                    assert answer.status == 404 and "error" in await answer.json()

        asyncio.run(episode())
