"""An episode over HTTP against real engines: what they say of versions, prefixes and log-probs is kept."""

import asyncio
import json

import aiohttp
import pytest
from engine_under_test import address_of, largest_difference, load_model, plain_log_probs
from tiny_model import make_tiny_model

from slime.agent.adapters import AgentAdapter
from slime.agent.session import Budget
from slime.utils.async_utils import run
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from slime.wire.control import EngineControl

HEADERS = {"Authorization": "Bearer e-1"}


async def converse(url, num_turns):
    messages = [{"role": "user", "content": "hello there, " * 4}]
    async with aiohttp.ClientSession() as http:
        for turn in range(num_turns):
            body = {"model": "m", "messages": messages, "stream": turn % 2 == 1}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=HEADERS) as answer:
                assert answer.status == 200, await answer.text()
                if not body["stream"]:
                    text = (await answer.json())["choices"][0]["message"]["content"]
                else:
                    text = "".join(_texts(await answer.text()))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]


def _texts(events):
    for line in events.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield choice["delta"].get("content") or ""


@pytest.mark.parametrize("engine", ["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def test_turns_of_an_episode_extend_each_other_in_a_real_engine(tmp_path, engine):
    model = make_tiny_model(tmp_path / "model")
    with address_of(engine, model, tmp_path / "engine.log") as url:
        version = run(EngineControl(url).info()).weight_version
        adapter = AgentAdapter(load_tokenizer(str(model)), url).start()
        try:
            budget = Budget(max_new_tokens=12)
            adapter.open_session("e-1", {"temperature": 1.0}, budget=budget, seed=5)
            asyncio.run(converse(adapter.url, 4))
            (sample,) = asyncio.run(adapter.finish_session("e-1", base_sample=Sample(index=1)))
        finally:
            adapter.stop()
    turns = sample.metadata["turns"]
    assert len(turns) == 4 and sum(sample.loss_mask) == sum(t["end"] - t["start"] for t in turns)
    assert all(span_version == version for span_version, _, _ in sample.version_spans)
    found = sample.prefix_cache_info
    assert found.total_prompt_tokens and found.cached_tokens > 0.5 * found.total_prompt_tokens
    check_log_probs(load_model(model), sample)


def check_log_probs(model, sample):
    """Each turn was sampled behind exactly the tokens that stand before it in the sample."""
    begin = len(sample.tokens) - sample.response_length
    for turn in sample.metadata["turns"]:
        start, end = turn["start"], turn["end"]
        prompt, said = sample.tokens[: begin + start], sample.tokens[begin + start : begin + end]
        wanted = plain_log_probs(model, prompt, said)
        assert largest_difference(wanted, sample.rollout_log_probs[start:end]) < 1e-4
