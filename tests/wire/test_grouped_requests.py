"""Requests of a group travel as one, and each is answered, aborted and refused as if it were alone."""

import asyncio

import pytest
from fake_engine import FakeEngine

from slime.liveness.waits import WaitTimeout
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError
from slime.wire.client import EngineClient
from slime.wire.grouped import MAX_REFUSALS
from slime.wire.protocol import GenerateRequest, SamplingParams


def request(number: int, group: str | None = "g") -> GenerateRequest:
    params = SamplingParams(max_new_tokens=4, sampling_seed=100 + number)
    return GenerateRequest([1, 2, 3], params, rid=f"r{number}", group=group, session=f"s{number}")


def ask(engine: FakeEngine, *requests: GenerateRequest, **options):
    async def scene():
        client = EngineClient(engine.url, **{"max_retries": 0, **options})
        return await asyncio.gather(*map(client.generate, requests), return_exceptions=True)

    return run(scene())


def test_a_group_is_one_request_and_its_answers_are_those_of_single_ones():
    with FakeEngine() as engine:
        together = ask(engine, *(request(n) for n in range(4)))
        assert engine.group_sizes == [4] and engine.paths.count("/generate") == 1
        alone = ask(engine, *(request(n, group=None) for n in range(4)))
    assert engine.group_sizes == [4] and engine.paths.count("/generate") == 5
    assert together == alone and len({one.ids for one in together}) == 4


def test_two_groups_are_two_requests_and_one_member_goes_alone():
    with FakeEngine() as engine:
        ask(engine, *(request(n, group="abbac"[n]) for n in range(5)))
    assert engine.group_sizes == [2, 2] and engine.paths.count("/generate") == 3


def test_a_member_is_answered_when_it_is_finished_and_not_with_the_last():
    async def scene(engine):
        client = EngineClient(engine.url, max_retries=0)
        tasks = [asyncio.ensure_future(client.generate(request(n))) for n in range(3)]
        done, rest = await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 2:
            more, rest = await asyncio.wait(rest, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        await client.cancel([engine.url], ["r1"])
        return [task.result().finish for task in done], (await rest.pop()).finish

    with FakeEngine(lambda payload, _: {"hold": True} if payload["rid"] == "r1" else None) as engine:
        finished, aborted = run(scene(engine))
    assert finished == ["length", "length"] and aborted == "abort"
    assert engine.group_sizes == [3]


def test_a_member_that_is_late_times_out_and_is_not_sent_again():
    with FakeEngine(lambda payload, _: {"hold": True} if payload["rid"] == "r1" else None) as engine:
        answers = ask(engine, *(request(n) for n in range(3)), timeout_s=1.0)
    assert isinstance(answers[1], WaitTimeout) and "3 requests of group g" in str(answers[1])
    assert engine.paths.count("/generate") == 1


@pytest.mark.parametrize("fault", [500, 400, {"break": True}])
def test_members_without_an_answer_are_sent_alone(fault):
    def script(payload, number):
        return fault if payload["rid"] == "r2" and number < 4 else None

    with FakeEngine(script) as engine:
        answers = ask(engine, *(request(n) for n in range(4)))
    assert [answer.finish for answer in answers] == ["length"] * 4
    assert engine.group_sizes == [4] and engine.paths.count("/generate") >= 2


def test_the_member_that_is_at_fault_fails_and_the_others_do_not():
    with FakeEngine(lambda payload, _: 422 if payload["rid"] == "r2" else None) as engine:
        answers = ask(engine, *(request(n) for n in range(4)))
    assert isinstance(answers[2], HttpError) and answers[2].status == 422
    assert [answers[n].finish for n in (0, 1, 3)] == ["length"] * 3


def test_engines_that_take_no_groups_are_asked_a_few_times_only():
    async def scene(engine):
        client = EngineClient(engine.url, max_retries=0)
        for _ in range(MAX_REFUSALS + 2):
            await asyncio.gather(*(client.generate(request(n)) for n in range(2)))

    with FakeEngine(takes_groups=False) as engine:
        run(scene(engine))
    assert engine.paths.count("/generate") == MAX_REFUSALS + 2 * (MAX_REFUSALS + 2)


def test_a_group_that_nobody_waits_for_any_more_is_hung_up():
    async def scene(engine):
        client = EngineClient(engine.url, max_retries=0)
        tasks = [asyncio.ensure_future(client.generate(request(n))) for n in range(3)]
        while engine.running < 3:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while engine.running:
            await asyncio.sleep(0.01)

    with FakeEngine(lambda payload, _: {"hold": True}) as engine:
        run(scene(engine), timeout_s=60)
    assert engine.group_sizes == [3] and engine.running == 0


def test_a_group_whose_members_all_leave_at_once_is_never_sent():
    async def scene(engine):
        client = EngineClient(engine.url, max_retries=0)
        tasks = [asyncio.ensure_future(client.generate(request(n))) for n in range(3)]
        asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in tasks])
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.generate(request(9, group=None))

    with FakeEngine() as engine:
        run(scene(engine), timeout_s=60)
    assert engine.group_sizes == [] and [r["rid"] for r in engine.requests] == ["r9"]
