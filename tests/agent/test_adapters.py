"""The endpoints over real HTTP, asked with a plain client: answers, streams, routes, limits, disconnects."""

import asyncio
import json

import aiohttp
import pytest
from agent_world import agent_world, check_exact

from slime.agent.session import Budget
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


def test_chat_completions_with_two_calls_in_a_turn_and_results_out_of_order():
    with agent_world([CALL + CALL, "done"]) as world:

        async def episode():
            first = await ask(world, "chat", [HELLO], tools=[CHAT_TOOL], logprobs=True)
            message = first["choices"][0]["message"]
            calls = message["tool_calls"]
            assert first["choices"][0]["finish_reason"] == "tool_calls" and message["content"] is None
            assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"at": "it"}] * 2
            entries = first["choices"][0]["logprobs"]["content"]
            assert [e["token_id"] for e in entries] == world.engine.said[0][1]
            results = [
                {"role": "tool", "tool_call_id": c["id"], "content": f"r{i}"} for i, c in enumerate(calls)
            ]
            second = await ask(world, "chat", [HELLO, message, *reversed(results)], tools=[CHAT_TOOL])
            assert second["choices"][0]["message"]["content"] == "done"
            assert second["usage"]["prompt_tokens"] == len(world.engine.said[1][0])

        asyncio.run(episode())
        (sample,) = finish(world)
        check_exact(world, [sample], num_turns=2)
        text = world.tokenizer.decode(sample.tokens)
        assert text.index("r0") < text.index("r1") and sample.metadata["use_tool"]
        assert sample.metadata["turns"][0]["tool_calls"] == ["look", "look"]


def test_responses_with_calls_and_thoughts():
    with agent_world(["<think>\nhm\n</think>\n\n" + CALL, "done"], family="qwen3") as world:

        async def episode():
            first = await ask(world, "responses", "hello", tools=[RESPONSES_TOOL, {"type": "web_search"}])
            assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
            output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "r"}
            again = [{"role": "user", "content": "hello"}, *first["output"], output]
            second = await ask(world, "responses", again, tools=[RESPONSES_TOOL])
            assert second["output"][0]["content"][0]["text"] == "done" and second["status"] == "completed"

        asyncio.run(episode())
        check_exact(world, finish(world), num_turns=2)


def test_responses_go_on_with_an_answer_that_is_named_and_not_sent_again():
    with agent_world([CALL + CALL, "done", "other"]) as world:

        async def episode():
            more = {"tools": [RESPONSES_TOOL], "instructions": "be brief"}
            first = await ask(world, "responses", "hello", **more)
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": f"r{place}"}
                for place, item in enumerate(first["output"])
            ]
            named = {"previous_response_id": first["id"], **more}
            second = await ask(world, "responses", results[::-1], **named)
            assert second["output"][0]["content"][0]["text"] == "done"
            assert second["previous_response_id"] == first["id"]
            body = body_of("responses", results[:1], **named)
            status, text, _ = await post(world, "responses", body)
            assert status == 400 and "have no result" in text
            body = body_of("responses", "x", previous_response_id="resp_none")
            status, text, _ = await post(world, "responses", body)
            assert status == 400 and json.loads(text)["error"]["code"] == "previous_response_not_found"
            # Instructions are not carried over, as in the real API: that is another conversation.
            await ask(world, "responses", "and?", previous_response_id=second["id"], tools=[RESPONSES_TOOL])

        asyncio.run(episode())
        kept, fork = finish(world)
        check_exact(world, [kept, fork], num_turns=3)
        text = world.tokenizer.decode(kept.tokens)
        assert text.index("be brief") < text.index("r0") < text.index("r1") < text.index("done")
        text = world.tokenizer.decode(fork.tokens)
        assert "be brief" not in text and text.index("r1") < text.index("and?") < text.index("other")


def test_anthropic_messages_with_thoughts_calls_and_a_count():
    with agent_world(["<think>\nhm\n</think>\n\nlook" + CALL, "done"], family="qwen3") as world:

        async def episode():
            body = body_of(
                "anthropic", [HELLO], tools=[ANTHROPIC_TOOL], system=[{"type": "text", "text": "s"}]
            )
            status, text, _ = await post(world, "anthropic", body, {"x-api-key": "key-1"})
            first = json.loads(text)
            assert status == 200 and first["stop_reason"] == "tool_use"
            assert [b["type"] for b in first["content"]] == ["thinking", "text", "tool_use"]
            result = {"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": "r"}
            # The client writes a default into the arguments: the turn is known by its id.
            first["content"][2]["input"]["more"] = False
            messages = [
                HELLO,
                {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": [result]},
            ]
            more = {"tools": [ANTHROPIC_TOOL], "system": "s"}
            status, text, _ = await post_count(world, body_of("anthropic", messages, **more))
            second = await ask(world, "anthropic", messages, **more)
            assert (
                json.loads(text)["input_tokens"]
                == second["usage"]["input_tokens"]
                == len(world.engine.said[1][0])
            )
            assert (
                second["content"] == [{"type": "text", "text": "done"}]
                and second["stop_reason"] == "end_turn"
            )

        asyncio.run(episode())
        samples = finish(world)
        assert len(samples) == 1
        check_exact(world, samples, num_turns=2)


async def post_count(world, body):
    async with (
        aiohttp.ClientSession() as http,
        http.post(world.url + "/v1/messages/count_tokens", json=body, headers=KEY) as answer,
    ):
        return answer.status, await answer.text(), answer.headers


def test_a_thought_that_the_client_drops_forks_and_both_turns_train():
    with agent_world(["<think>\nhm\n</think>\n\nyes", "done"], family="qwen3") as world:

        async def episode():
            await ask(world, "anthropic", [HELLO])
            messages = [HELLO, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
            await ask(world, "anthropic", messages)

        asyncio.run(episode())
        samples = finish(world)
        assert len(samples) == 2 and samples[0].rollout_id == samples[1].rollout_id == 3
        check_exact(world, samples, num_turns=2)


@pytest.mark.parametrize("api", PATHS)
def test_a_stream_says_what_the_whole_answer_would(api):
    tool = {"chat": CHAT_TOOL, "responses": RESPONSES_TOOL, "anthropic": ANTHROPIC_TOOL}[api]
    with agent_world(["<think>\nhmm, ünï\n</think>\n\nI look < at it " + CALL], family="qwen3") as world:
        status, text, headers = asyncio.run(
            post(
                world,
                api,
                body_of(api, [HELLO], stream=True, tools=[tool], stream_options={"include_usage": True}),
            )
        )
        assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
        events = events_of(text)
        shown = "".join(map(shown_text, events))
        assert shown.strip() == "I look < at it"
        assert "".join(map(shown_thought, events)).strip() == "hmm, ünï"
        assert '{\\"at\\": \\"it\\"}' in text
        if api == "chat":
            assert events[-1]["usage"]["completion_tokens"] == len(world.engine.said[0][1])
            assert text.endswith("data: [DONE]\n\n")
        if api == "responses":
            assert [e["sequence_number"] for e in events] == list(range(len(events)))
            assert events[-1]["type"] == "response.completed"
        if api == "anthropic":
            assert events[-1]["type"] == "message_stop" and "event: content_block_stop" in text
        check_exact(world, finish(world), num_turns=1)


def shown_text(event):
    if event.get("object") == "chat.completion.chunk":
        return (event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
    if event["type"] == "response.output_text.delta":
        return event["delta"]
    return event.get("delta", {}).get("text", "") if event["type"] == "content_block_delta" else ""


def shown_thought(event):
    if event.get("object") == "chat.completion.chunk":
        return (event["choices"][0]["delta"].get("reasoning_content") or "") if event["choices"] else ""
    if event["type"] == "response.reasoning_summary_text.delta":
        return event["delta"]
    return event.get("delta", {}).get("thinking", "") if event["type"] == "content_block_delta" else ""


def test_tokens_are_shown_while_the_engine_makes_more():
    with agent_world([{"hold": True, "tokens": [ord(c) - 33 for c in "abcdef"]}]) as world:

        async def episode():
            async with aiohttp.ClientSession() as http:
                body = body_of("chat", [HELLO], stream=True)
                async with http.post(world.url + PATHS["chat"], json=body, headers=KEY) as answer:
                    seen = b""
                    while b'"content": "' not in seen.replace(b'"content": ""', b""):
                        seen += await asyncio.wait_for(answer.content.readany(), 60)
                    assert world.engine.running == 1  # the engine has not ended

        asyncio.run(episode())


def test_a_client_that_leaves_ends_its_request_at_the_engine_and_its_session_goes_on():
    with agent_world([{"hold": True}, {"hold": True}, "done"]) as world:

        async def leave(stream):
            body = body_of("chat", [HELLO], stream=stream)
            async with aiohttp.ClientSession() as http:
                request = asyncio.ensure_future(http.post(world.url + PATHS["chat"], json=body, headers=KEY))
                before = len(world.engine.aborts)
                while not world.engine.running:
                    await asyncio.sleep(0.01)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
            while len(world.engine.aborts) == before or world.engine.running:
                await asyncio.sleep(0.01)

        async def episode():
            await asyncio.wait_for(leave(False), 60)
            await asyncio.wait_for(leave(True), 60)
            assert {a["rid"] for a in world.engine.aborts} == {r["rid"] for r in world.engine.requests}
            answer = await ask(world, "chat", [HELLO])
            assert answer["choices"][0]["message"]["content"] == "done"

        asyncio.run(episode())
        samples = finish(world)
        check_exact(world, samples, num_turns=1)


def test_a_push_in_mid_answer_is_continued_and_versions_are_kept():
    with agent_world(["unused"]) as world:
        engine = world.engine
        half = world.tokenizer.encode("ab", add_special_tokens=False)
        engine.answers = [{"tokens": half, "finish": "abort"}, "cd"]
        answer = asyncio.run(ask(world, "chat", [HELLO]))
        assert answer["choices"][0]["message"]["content"] == "abcd"
        assert engine.requests[1]["input_ids"] == engine.requests[0]["input_ids"] + half
        (sample,) = finish(world)
        assert sample.loss_mask == [1] * 5 and sample.response_length == 5


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
            body = body_of("chat", [HELLO], metadata={"session_id": "a"})
            assert (await post(world, "chat", body, {}))[0] == 200
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
        assert "the policy said nothing (prompt is too long" in silent.reward_failure.reason
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


def test_an_answer_that_was_lost_on_the_way_is_given_again_to_a_repeated_request():
    with agent_world(["one", "two"]) as world:

        async def episode():
            body = json.dumps(body_of("chat", [HELLO]))
            first = json.loads((await post(world, "chat", None, KEY, body))[1])
            again = json.loads(
                (await post(world, "chat", None, {**KEY, "x-stainless-retry-count": "1"}, body))[1]
            )
            fresh = json.loads((await post(world, "chat", None, KEY, body))[1])
            texts = [one["choices"][0]["message"]["content"] for one in (first, again, fresh)]
            assert texts == ["one", "one", "two"]

        asyncio.run(episode())
        samples = finish(world)
        assert len(samples) == 2
        check_exact(world, samples, num_turns=2)


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
    "a forced call": (body_of("chat", [HELLO], tools=[CHAT_TOOL], tool_choice="required"), None),
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


def test_a_stream_of_the_engine_that_breaks_is_continued():
    with agent_world(["unused"]) as world:
        whole = world.tokenizer.encode("abcdef", add_special_tokens=False)
        world.engine.answers = [{"tokens": whole, "break_after": 3}, "xyz"]
        _, text, _ = asyncio.run(post(world, "chat", body_of("chat", [HELLO], stream=True)))
        assert "".join(map(shown_text, events_of(text))) == "abcxyz"
        (sample,) = finish(world)
        assert sample.response_length == 7


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
            assert "no program asked it anything" in samples[0].reward_failure.reason
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
