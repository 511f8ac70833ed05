"""The judge: a model that scores answers, and what happens when it says nothing useful."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from argument_helpers import declared, parse

from slime.agent.rewards.judge import ask_text, read_score
from slime.arguments.groups.topology import plain_topology
from slime.cli.quickstart import tiny
from slime.rollout.rm_hub import async_rm
from slime.utils.async_utils import run
from slime.utils.reward_failure import RewardFailure
from slime.utils.types import Sample


@asynccontextmanager
async def judge_that_says(*texts):
    """A server that gives each text once, the last one again and again; and the bodies it was sent."""
    bodies, left = [], list(texts)

    async def answer(request):
        bodies.append({**await request.json(), "key": request.headers.get("Authorization")})
        text = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(text, int):
            return web.json_response({"error": {"message": "no"}}, status=text)
        spoken = text if isinstance(text, dict) else {"choices": [{"message": {"content": text}}]}
        return web.json_response(spoken)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", bodies
    finally:
        await runner.cleanup()


def judged(*texts, **settings):
    async def inner():
        async with judge_that_says(*texts) as (url, bodies):
            sample = Sample(index=3, prompt="Name a {label}.", response="a cat", label="cat")
            args = declared(rm_type="judge", judge_url=url, judge_model="big", **settings)
            return await async_rm(args, sample), bodies

    return run(inner())


def test_the_score_becomes_a_reward_from_0_to_1(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    reward, bodies = judged("It is right. Score: 2 at first.\n**Score: 8**")
    assert reward == 0.8
    (body,) = bodies
    assert body["model"] == "big"
    assert body["key"] == "Bearer secret"
    assert "Name a {label}." in body["messages"][0]["content"]
    assert "a cat" in body["messages"][0]["content"]
    assert judged("Score: 3", judge_max_score=4.0)[0] == 0.75


@pytest.mark.parametrize("rubbish", ["I cannot say.", "Score: high", "Score: 11", "Score: -1", ""])
def test_rubbish_is_a_failure_with_a_name_and_never_zero(rubbish):
    reward, bodies = judged(rubbish)
    assert isinstance(reward, RewardFailure)
    assert reward.kind == "infra_error"
    assert "the judge gave no score from 0 to 10 in 3 tries" in reward.reason
    assert [body["temperature"] for body in bodies] == [0.0, 0.7, 0.7]


def test_a_second_try_may_give_a_score():
    reward, bodies = judged("hm", "Score: 10")
    assert (reward, len(bodies)) == (1.0, 2)


def test_an_endpoint_that_refuses_or_speaks_otherwise_is_named():
    for answer, told in ((400, "400"), ({"oops": 1}, "no chat completion")):
        reward, _ = judged(answer)
        assert isinstance(reward, RewardFailure)
        assert told in reward.reason


def test_a_judge_that_hangs_ends_with_its_budget():
    async def inner():
        async def hang(reader, writer):
            await reader.read()  # to the end: until who asked goes away
            writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        args = declared(rm_type="judge", judge_url=f"http://127.0.0.1:{port}/v1", timeouts={"judge": 0.3})
        reward = await async_rm(args, Sample(index=3, prompt="p", response="r"))
        server.close()
        return reward

    assert "within --timeouts judge=0.3" in run(inner()).reason


def test_a_rubric_of_ones_own_is_filled_in_once(tmp_path):
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Q {prompt} A {response} L {label} of {max_score:g}")
    sample = Sample(prompt=[{"role": "user", "content": "why"}], label=None)
    args = declared(judge_rubric=str(rubric))
    assert ask_text(args, sample, "{label} {x}") == "Q user: why A {label} {x} L none of 10"
    rubric.write_text("Q {prompt}")
    from slime.agent.rewards import judge

    judge._rubric.cache_clear()
    with pytest.raises(ValueError, match=r"has no \{response\}"):
        ask_text(args, sample, "x")


def test_scores_are_read_after_the_thoughts():
    assert read_score("<think>Score: 9</think> Score: 4", 10) == 4
    assert read_score('{"score": 7.5}', 10) == 7.5
    assert read_score("The score is 3", 10) == 3


def test_flags_of_the_judge_need_the_judge():
    with pytest.raises(ValueError, match="but it has an effect only with --rm-type judge"):
        parse("--judge-url", "http://x/v1", rm_type="math")
    assert parse("--judge-url", "http://x/v1", rm_type="judge").judge_url == "http://x/v1"


@asynccontextmanager
async def engine_that_says(ids):
    """A fake engine: answers every request with these token ids."""
    bodies = []

    async def generate(request):
        bodies.append(await request.json())
        meta = {"id": "x", "finish_reason": {"type": "stop"}, "weight_version": "1"}
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1], bodies
    finally:
        await runner.cleanup()


def test_a_model_of_the_run_can_be_the_judge(tmp_path):
    tokenizer = tiny.build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    said = tokenizer.encode("Fine. Score: 7")

    async def inner():
        async with engine_that_says(said) as (port, bodies):
            args = declared(
                rm_type="judge",
                hf_checkpoint=str(tmp_path),
                engine_topology=plain_topology(str(tmp_path), 1, 1),
                sglang_model_routers={"default": ("127.0.0.1", port)},
            )
            sample = Sample(index=3, prompt="Sort 21", response="12", label="12")
            return await async_rm(args, sample), bodies[0]

    reward, body = run(inner())
    assert reward == 0.7
    assert "Sort 21" in tokenizer.decode(body["input_ids"])
    assert body["sampling_params"]["max_new_tokens"] == 512


def test_a_judge_that_the_run_does_not_serve_is_named():
    args = declared(
        rm_type="judge",
        judge_model="big",
        engine_topology=plain_topology("x", 1, 1),
        sglang_model_routers={"default": ("127.0.0.1", 1)},
    )
    with pytest.raises(ValueError, match="--judge-model is 'big', but this run serves default"):
        run(async_rm(args, Sample(index=3, prompt="p", response="r")))
