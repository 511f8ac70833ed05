"""More requests at once than an engine has places for: each is answered, or refused politely."""

import asyncio
import json
import resource
from collections import Counter

import aiohttp
import pytest
from engine_under_test import start_engine
from hostile_calls import IDS, assert_serves

BODY = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}


async def _ask_all(url, count):
    """Answers to `count` requests that are open at once: (status, body, headers)."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask():
            async with session.post(f"{url}/generate", json=BODY) as answer:
                return answer.status, await answer.read(), answer.headers.get("Retry-After")

        return await asyncio.gather(*(ask() for _ in range(count)))


def check(answers):
    """How many were served; the others were told in words to come again."""
    counts = Counter(status for status, _, _ in answers)
    assert set(counts) <= {200, 503}, counts
    for status, body, retry in answers:
        if status == 200:
            assert len(json.loads(body)["output_ids"]) == 2
        else:
            assert "retry" in json.loads(body)["error"]["message"] and retry == "1"
    return counts[200]


def test_an_engine_with_few_files_serves_some_refuses_others_and_goes_on(folder, tmp_path):
    flags = ("--max-running-requests", "8", "--max-total-tokens", "4096", "--device", "cpu")
    with start_engine(folder, tmp_path, *flags) as (url, process, _, _):
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (100, 100))
        num_served = check(asyncio.run(_ask_all(url, 150)))
        assert 1 <= num_served <= 150
        assert check(asyncio.run(_ask_all(url, 4))) == 4 and process.poll() is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_requests_at_once_are_all_answered(engine):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 11_000:
        pytest.skip("10,000 connections need `ulimit -Hn` of 11,000 for the client and for the engine")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 11_000), hard))
    num_served = check(asyncio.run(_ask_all(engine.url, 10_000)))
    assert num_served == 10_000, "an engine with files enough refuses nobody"
    assert_serves(engine)
