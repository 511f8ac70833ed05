"""The endpoints over real HTTP, asked with a plain client: answers, streams, disconnects, pushes."""

import asyncio
import json
import threading

import aiohttp
import pytest
from adapter_client import (
    ANTHROPIC_TOOL,
    CALL,
    CHAT_TOOL,
    HELLO,
    KEY,
    PATHS,
    RESPONSES_TOOL,
    ask,
    body_of,
    events_of,
    finish,
    post,
)
from agent_world import agent_world, check_exact
from patience import PATIENCE_S

from slime.agent.adapters import common


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


def begins_at_once(monkeypatch) -> threading.Event:
    """The headers of a stream are sent 0.01 s after it was asked for; set once they are."""
    begun, begin = threading.Event(), common._begin

    async def begin_and_tell(request):
        response = await begin(request)
        begun.set()
        return response

    monkeypatch.setattr(common, "_KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(common, "_begin", begin_and_tell)
    return begun


def test_a_stream_is_kept_alive_until_its_response_is_complete(monkeypatch):
    begun = begins_at_once(monkeypatch)
    with agent_world([{"until": begun.is_set, "tokens": [3, 4]}]) as world:
        status, text, _ = asyncio.run(post(world, "chat", body_of("chat", [HELLO], stream=True)))
        assert status == 200 and text.startswith(": the model is writing\n\n") and "[DONE]" in text
        check_exact(world, finish(world), num_turns=1)


def test_an_engine_that_fails_behind_a_stream_that_has_begun_is_an_event(monkeypatch):
    begun = begins_at_once(monkeypatch)
    for api in PATHS:
        begun.clear()
        with agent_world(lambda prompt: 400 if begun.wait(PATIENCE_S) else 500) as world:
            status, text, _ = asyncio.run(post(world, api, body_of(api, [HELLO], stream=True)))
            assert status == 200 and "the engine refuses the request" in text, text


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
