"""Images that clients and tools show within an episode: a real engine reads what the trainer reads."""

import asyncio
import base64
import json

import aiohttp
import pytest
import torch
from agent_world import agent_world
from engine_under_test import address_of
from tiny_vision import make_picture, make_vision_model
from trainer_helpers import backend_of, init_process_group, trainer_args

from slime.agent.adapters import AgentAdapter
from slime.agent.session import Budget
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.utils.media.pictures import picture_url
from slime.utils.misc import is_installed
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
NUM_IMAGES = 3


def part(api, url):
    if api == "chat":
        return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
    if api == "responses":
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    media, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}


def text(api, words):
    return {"type": "input_text" if api == "responses" else "text", "text": words}


def user(api, words, *urls):
    return {"role": "user", "content": [text(api, words), *(part(api, url) for url in urls)]}


def call_and_result(api, *content):
    """A call that the program made up and what its tool showed: both are part of the prompt."""
    if api == "chat":
        function = {"name": "look", "arguments": "{}"}
        yield {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }
        yield {"role": "tool", "tool_call_id": "c", "content": list(content)}
    elif api == "responses":
        yield {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        yield {"type": "function_call_output", "call_id": "c", "output": list(content)}
    else:
        block = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        yield {"role": "assistant", "content": [block]}
        result = {"type": "tool_result", "tool_use_id": "c", "content": list(content)}
        yield {"role": "user", "content": [result]}


async def ask(http, url, api, messages):
    body = {"model": "m", "input" if api == "responses" else "messages": messages}
    if api == "anthropic":
        body["max_tokens"] = 12
    async with http.post(url + PATHS[api], json=body) as answer:
        return answer.status, json.loads(await answer.text())


def answer_text(api, answer):
    if api == "chat":
        return answer["choices"][0]["message"]["content"]
    if api == "responses":
        return answer["output"][-1]["content"][0]["text"]
    return "".join(block.get("text", "") for block in answer["content"])


async def episode(url, api):
    urls = [picture_url(make_picture(seed, 64, 48 + 16 * seed)) for seed in range(NUM_IMAGES)]
    headers = {"Authorization": f"Bearer {api}"}
    messages = [user(api, "see", urls[0]), *call_and_result(api, text(api, "tool"), part(api, urls[1]))]
    async with aiohttp.ClientSession(headers=headers) as http:
        for following in (user(api, "and", urls[2]), user(api, "end")):
            status, answer = await ask(http, url, api, messages)
            assert status == 200, answer
            messages += [{"role": "assistant", "content": answer_text(api, answer)}, following]
        status, answer = await ask(http, url, api, messages)
        assert status == 200, answer


def trained_difference(backend, sample):
    batch = samples_to_batch(backend.args, [sample])
    (own,) = backend.log_probs(build_micro_batches(batch, [[0]])).log_probs
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    return float((own - torch.tensor(sample.rollout_log_probs))[mask].abs().max())


ENGINES = [("embedded", "qwen2_5_vl"), ("embedded", "smolvlm")]
ENGINES.append(pytest.param("sglang", "qwen3_vl", marks=pytest.mark.sglang))
RESIZED_ALIKE = ("--image-processor-backend", "torchvision" if is_installed("torchvision") else "pil")


@pytest.mark.parametrize(("engine", "family"), ENGINES)
def test_images_of_clients_and_tools_train_with_the_log_probs_of_the_engine(tmp_path, engine, family):
    model = make_vision_model(tmp_path / "model", family)
    samples = {}
    with address_of(engine, model, tmp_path / "engine.log", *RESIZED_ALIKE) as url:
        processor, tokenizer = load_processor(str(model)), load_tokenizer(str(model))
        adapter = AgentAdapter(tokenizer, url, processor=processor).start()
        try:
            for api in PATHS:
                adapter.open_session(
                    api, {"temperature": 1.0, "ignore_eos": True}, budget=Budget(None, 1500, 12)
                )
                asyncio.run(episode(adapter.url, api))
                base = Sample(index=1, group_index=0)
                samples[api] = asyncio.run(adapter.finish_session(api, base_sample=base))
        finally:
            adapter.stop()
    init_process_group()
    backend = backend_of(trainer_args(model))
    for api, (sample,) in samples.items():
        assert len(sample.metadata["turns"]) == 3 and sum(sample.loss_mask) == 36, api
        assert len(sample.image_spans) == len(sample.multimodal_inputs["images"]) == NUM_IMAGES
        start = len(sample.tokens) - sample.response_length
        assert sample.image_spans[1][1] <= start <= sample.image_spans[2][0], "the third came later"
        assert trained_difference(backend, sample) < 1e-4, api


@pytest.mark.parametrize("api", PATHS)
def test_what_is_no_image_is_refused_in_the_error_json_of_the_api(api, tmp_path):
    text_only = picture_url(make_picture(0))
    bad = {
        "no picture": "data:image/png;base64," + base64.b64encode(b"hello").decode(),
        "damaged base64": "data:image/png;base64,!!!",
        "not fetched": "https://example.org/cat.png",
        "text only": text_only,
    }
    said = {"damaged base64": "base64", "not fetched": "data URL", "text only": "reads text only"}
    with agent_world(["one"]) as world:

        async def refused():
            async with aiohttp.ClientSession(headers={"Authorization": "Bearer key-1"}) as http:
                for name, url in bad.items():
                    status, answer = await ask(http, world.url, api, [user(api, "see", url)])
                    assert status == 400, (name, answer)
                    error = answer["error"]
                    assert error["type"] == "invalid_request_error", name
                    assert said.get(name, "picture") in error["message"], (name, error)
                status, _ = await ask(http, world.url, api, [user(api, "see")])
                assert status == 200

        asyncio.run(refused())
        (sample,) = asyncio.run(world.adapter.finish_session("key-1", base_sample=Sample(index=1)))
        assert len(sample.metadata["turns"]) == 1
