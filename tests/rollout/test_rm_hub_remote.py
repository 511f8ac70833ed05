"""The remote_rm reward: a judge over real HTTP."""

import asyncio
import contextlib

import pytest
from aiohttp import web
from argument_helpers import declared

from slime.rollout.rm_hub import RewardConfigError, remote_rm, score_samples
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.utils.http_utils import close_session
from slime.utils.types import Sample


@pytest.fixture(autouse=True)
def _fresh():
    reset_breaker()


@contextlib.asynccontextmanager
async def judge_server(handler):
    app = web.Application()
    app.router.add_post("/score", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/score"
    finally:
        await close_session()
        await runner.cleanup()


def test_remote_judge_gets_prompt_response_and_label_and_its_number_is_the_score():
    seen = []

    async def handler(request):
        seen.append(await request.json())
        return web.json_response(0.75)

    async def main():
        sample = Sample(index=0, prompt="p", response="r", label="l")
        async with judge_server(handler) as url:
            await score_samples(declared(rm_type="remote_rm", rm_url=url), [sample])
        return sample

    assert asyncio.run(main()).reward == 0.75
    assert seen == [{"prompt": "p", "response": "r", "label": "l"}]


def test_remote_judge_that_stumbles_is_asked_again():
    answers = [web.Response(status=500), web.Response(status=503), web.json_response({"score": 1.0})]

    async def handler(request):
        return answers.pop(0)

    async def main():
        sample = Sample(index=0)
        async with judge_server(handler) as url:
            await score_samples(declared(rm_type="remote_rm", rm_url=url, reward_key="score"), [sample])
        return sample

    assert asyncio.run(main()).reward == {"score": 1.0}
    assert answers == []


def test_remote_judge_that_refuses_is_an_infra_error_without_retries():
    hits = []

    async def handler(request):
        hits.append(1)
        return web.Response(status=422, text="label missing")

    async def main():
        async with judge_server(handler) as url:
            return await remote_rm(declared(rm_url=url), Sample(index=0))

    failure = asyncio.run(main())
    assert failure.kind == "infra_error" and "422" in failure.reason and "label missing" in failure.reason
    assert hits == [1]


def test_remote_judge_that_is_down_is_an_infra_error_naming_the_url():
    async def main():
        try:
            return await remote_rm(declared(rm_url="http://127.0.0.1:9/score"), Sample(index=0), max_tries=2)
        finally:
            await close_session()

    failure = asyncio.run(main())
    assert failure.kind == "infra_error" and "http://127.0.0.1:9/score" in failure.reason


def test_remote_judge_that_never_answers_ends_at_the_total_deadline():
    async def handler(request):
        await answered.wait()

    async def main():
        async with judge_server(handler) as url:
            failure = await remote_rm(declared(rm_url=url), Sample(index=0), deadline_s=0.3)
            answered.set()
            return failure

    answered = asyncio.Event()
    failure = asyncio.run(main())
    assert failure.kind == "infra_error" and "within 0.3 s" in failure.reason


def test_remote_judge_without_url_is_a_configuration_error():
    with pytest.raises(RewardConfigError, match="--rm-url"):
        asyncio.run(score_samples(declared(rm_type="remote_rm"), [Sample(index=0)]))
