"""An episode over HTTP against a real engine: versions are its own, and prefixes are reused."""

import asyncio
import json

import aiohttp
from engine_under_test import served_by_embedded
from tiny_model import make_tiny_model

from slime.agent.adapters import AgentAdapter
from slime.agent.session import Budget
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

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


def test_turns_of_an_episode_extend_each_other_in_a_real_engine(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    with served_by_embedded(model, tmp_path / "engine.log") as (control, info, _):
        adapter = AgentAdapter(load_tokenizer(str(model)), control.url).start()
        try:
            budget = Budget(max_new_tokens=12)
            adapter.open_session("e-1", {"temperature": 1.0}, budget=budget, seed=5)
            asyncio.run(converse(adapter.url, 4))
            (sample,) = asyncio.run(adapter.finish_session("e-1", base_sample=Sample(index=1)))
        finally:
            adapter.stop()
    turns = sample.metadata["turns"]
    assert len(turns) == 4 and sum(sample.loss_mask) == sum(t["end"] - t["start"] for t in turns)
    assert all(version == info.weight_version for version, _, _ in sample.version_spans)
    found = sample.prefix_cache_info
    assert found.total_prompt_tokens and found.prefix_cache_hit_rate > 0.5
