"""The embedded engine speaks OpenAI's API, alone and behind the balancer, as generate functions expect."""

import json

import aiohttp
import pytest
from patience import PATIENCE_S

from slime.engines.balancer import Balancer
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.processing_utils import load_tokenizer

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2="}]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
TIMEOUT = aiohttp.ClientTimeout(total=PATIENCE_S)


@pytest.fixture(scope="module", params=["engine", "balancer"])
def url(request, engine):
    """The address of the engine, or of a balancer in front of it."""
    if request.param == "engine":
        yield engine.url
        return
    balancer = Balancer([engine.url])
    yield f"http://127.0.0.1:{run(balancer.start())}"
    run(balancer.stop())


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder))


def ask(url, body=None):
    """(status, body) of a request; a GET without a body."""

    async def send():
        how = {"json": body} if body is not None else {}
        method = "POST" if body is not None else "GET"
        session = http_utils.get_session()
        async with session.request(
            method, url, timeout=TIMEOUT, headers={"User-Agent": "x"}, **how
        ) as answer:
            return answer.status, json.loads(await answer.text())

    return run(send())


def stream(url, body):
    """The events of a stream; the last was [DONE]."""

    async def send():
        async with http_utils.get_session().post(
            url, json={**body, "stream": True}, timeout=TIMEOUT
        ) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            return await answer.text()

    *events, done, end = run(send()).split("\n\n")
    assert done == "data: [DONE]" and end == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def native(engine, ids, **sampling):
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **sampling},
    }
    return ask(f"{engine.url}/generate", {**body, "return_logprob": True})[1]


def chat_ids(tokenizer, messages=MESSAGES):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_chat_is_the_templates_prompt_and_the_engines_tokens(url, engine, tokenizer):
    ids = chat_ids(tokenizer)
    expected = native(engine, ids)
    status, said = ask(url + CHAT, {"model": "any", "messages": MESSAGES, "logprobs": True, **GREEDY})
    assert status == 200 and said["object"] == "chat.completion" and said["model"] == "any"
    [choice] = said["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected["text"]}
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == expected["output_ids"]
    told = [row[0] for row in expected["meta_info"]["output_token_logprobs"]]
    assert [entry["logprob"] for entry in entries] == pytest.approx(told, abs=1e-5)
    assert said["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 8, "total_tokens": len(ids) + 8}
    assert said["metadata"]["weight_version"] == "default"


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}], "2+\n2="]
)
def test_parts_of_a_message_are_its_text(url, tokenizer, content):
    status, said = ask(url + CHAT, {"messages": [{"role": "user", "content": content}], **GREEDY})
    ids = chat_ids(tokenizer, [{"role": "user", "content": "2+\n2="}])
    assert status == 200 and said["usage"]["prompt_tokens"] == len(ids)


def test_tools_and_earlier_calls_are_rendered_by_the_template(url):
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "a", "content": "3"})
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert ask(url + CHAT, {"messages": messages, "tools": tools, "tool_choice": "auto", **GREEDY})[0] == 200
    messages[2]["tool_calls"] = ["x"]
    assert ask(url + CHAT, {"messages": messages, **GREEDY})[0] == 400


def test_a_text_or_ids_or_several_are_completed(url, engine, tokenizer):
    ids = tokenizer.encode("2+2=")
    expected = native(engine, ids)["text"]
    for prompt in ("2+2=", ids):
        status, said = ask(url + COMPLETIONS, {"model": "m", "prompt": prompt, "logprobs": 1, **GREEDY})
        [choice] = said["choices"]
        assert status == 200 and said["object"] == "text_completion" and choice["text"] == expected
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == 8
    for prompts in (["2+2=", "3"], [ids, tokenizer.encode("3")]):
        _, said = ask(url + COMPLETIONS, {"prompt": prompts, "n": 2, **GREEDY})
        assert [choice["index"] for choice in said["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in said["choices"]][:2] == [expected] * 2
        assert said["usage"]["prompt_tokens"] == len(ids) + len(tokenizer.encode("3"))
        assert said["usage"]["completion_tokens"] == 32
    assert ask(url + COMPLETIONS, {"prompt": "2", "ignore_eos": True})[1]["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("seed", [None, 5])
def test_several_choices_differ_and_a_seed_repeats_them(url, seed):
    body = {"messages": MESSAGES, "n": 3, "max_tokens": 12, "ignore_eos": True}
    body |= {"seed": seed} if seed is not None else {}
    first, again = (ask(url + CHAT, body)[1]["choices"] for _ in range(2))
    texts = [choice["message"]["content"] for choice in first]
    assert len(set(texts)) == 3
    assert (texts == [choice["message"]["content"] for choice in again]) == (seed is not None)
    if seed is not None:  # a stream draws the same
        streamed = ["", "", ""]
        for event in stream(url + CHAT, body):
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["delta"].get("content", "")
        assert streamed == texts


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_is_the_whole_response(url, path):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "2+2="}
    body = {**prompt, **GREEDY, "logprobs": True if path == CHAT else 1}
    _, whole = ask(url + path, body)
    events = stream(url + path, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert {event["object"] for event in events} == {
        "chat.completion.chunk" if path == CHAT else "text_completion"
    }
    choices = [choice for event in events for choice in event["choices"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    if path == CHAT:
        assert choices[0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
        entries = [one for c in choices if c.get("logprobs") for one in c["logprobs"]["content"]]
        assert entries == whole["choices"][0]["logprobs"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]


def test_a_stop_string_ends_a_response_and_no_part_of_it_is_streamed(url):
    body = {"prompt": "2+2=", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    text = ask(url + COMPLETIONS, body)[1]["choices"][0]["text"]
    stop = text[6:9]
    body["stop"] = stop
    [choice] = ask(url + COMPLETIONS, body)[1]["choices"]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    events = stream(url + COMPLETIONS, body)
    assert "".join(c["text"] for event in events for c in event["choices"]) == choice["text"]


def test_the_served_model_is_listed(url, folder):
    status, said = ask(url + MODELS)
    assert status == 200 and said["object"] == "list"
    [model] = said["data"]
    assert model["id"] == str(folder) and model["object"] == "model" and model["max_model_len"] > 0


REFUSED = {
    "no messages": (CHAT, {}),
    "messages of a string": (CHAT, {"messages": "hi"}),
    "empty messages": (CHAT, {"messages": []}),
    "a message without a role": (CHAT, {"messages": [{"content": "x"}]}),
    "a part that is no text": (CHAT, {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}),
    "no prompt": (COMPLETIONS, {}),
    "empty prompt": (COMPLETIONS, {"prompt": ""}),
    "a prompt of an object": (COMPLETIONS, {"prompt": {}}),
    "a mixed prompt": (COMPLETIONS, {"prompt": ["a", 5]}),
    "n of zero": (CHAT, {"messages": MESSAGES, "n": 0}),
    "n of a string": (CHAT, {"messages": MESSAGES, "n": "2"}),
    "a billion choices": (CHAT, {"messages": MESSAGES, "n": 10**9}),
    "temperature below zero": (CHAT, {"messages": MESSAGES, "temperature": -1}),
    "max_tokens of a string": (CHAT, {"messages": MESSAGES, "max_tokens": "8"}),
    "candidates": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}),
    "candidates of a completion": (COMPLETIONS, {"prompt": "2", "logprobs": 5}),
    "a bias": (CHAT, {"messages": MESSAGES, "logit_bias": {"5": 100}}),
    "a grammar": (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}),
    "a forced call": (CHAT, {"messages": MESSAGES, "tool_choice": "required"}),
    "echo": (COMPLETIONS, {"prompt": "2", "echo": True}),
    "stream of a string": (CHAT, {"messages": MESSAGES, "stream": "yes"}),
    "a prompt beyond the context": (COMPLETIONS, {"prompt": "2" * 100_000}),
    "an adapter that is not there": (CHAT, {"messages": MESSAGES, "lora_path": "other"}),
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_cannot_be_done_is_an_error_in_openais_shape(url, which):
    path, body = REFUSED[which]
    status, said = ask(url + path, {"model": "m", **body})
    assert status == 400 and set(said["error"]) == {"message", "type", "param", "code"}
    assert said["error"]["type"] == "invalid_request_error" and 0 < len(said["error"]["message"]) < 2000
    assert ask(url + COMPLETIONS, {"prompt": "2", "max_tokens": 1})[0] == 200
