"""Requests to an engine as bytes, for tests of what it refuses."""

import json
from contextlib import ExitStack

import aiohttp
import torch

from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.wire.manifest import WeightManifest, fill_bucket

VOCAB, CONTEXT = 128, 256
PROMPT_TEXT = "hello"
IDS = [5, 6, 7]


def send(engine, endpoint: str, body: bytes | dict, **headers) -> tuple[int, str]:
    """(status, text) of whatever is answered."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}

    async def post():
        timeout = aiohttp.ClientTimeout(total=120)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{engine.url}/{endpoint}", data=data, headers=headers) as answer,
        ):
            return answer.status, await answer.text()

    return run(post())


def assert_serves(engine) -> None:
    assert engine.process.poll() is None, f"the engine ended with {engine.process.returncode}"
    assert len(engine.generate(IDS, max_new_tokens=2, ignore_eos=True).ids) == 2


def with_sampling(**sampling) -> dict:
    return {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2, **sampling}}


def a_manifest(engine, count: int) -> tuple[ExitStack, dict]:
    """`count` small buckets, each a segment of its own."""
    stack, buckets = ExitStack(), []
    tensor = torch.zeros(4)
    for number in range(count):
        segment = shm.create_segment(16, engine.prefix)
        stack.callback(segment.unlink)
        buckets.append(fill_bucket(segment.name, segment.buffer, [(f"t{number}", tensor)]))
    return stack, WeightManifest("run:1", tuple(buckets), count, 16 * count).to_json()
