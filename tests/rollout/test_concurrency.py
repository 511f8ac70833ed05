"""The limit on requests in flight, and how it follows the engines' load."""

import asyncio

from fake_engine import FakeEngine
from patience import PATIENCE_S
from rollout_helpers import assert_conserved, make_args, make_source

from slime.rollout.generation import concurrency
from slime.rollout.generation.concurrency import Aimd, EngineLoad, Limit, read_loads
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.async_utils import run

AIMD = Aimd(floor=2, ceiling=100, step=8)


def test_the_limit_grows_by_steps_while_the_engines_have_no_queue_and_work_waits_here():
    load = EngineLoad(running=20, waiting=0, retracted=0)
    assert AIMD.next_limit(20, load, held_back=True) == 28
    assert AIMD.next_limit(97, load, held_back=True) == 100
    assert AIMD.next_limit(20, load, held_back=False) == 20


def test_the_limit_shrinks_by_a_share_on_a_queue_or_a_retraction():
    assert AIMD.next_limit(40, EngineLoad(40, 10, 0), held_back=True) == 30
    assert AIMD.next_limit(40, EngineLoad(40, 0, 1), held_back=True) == 30
    assert AIMD.next_limit(2, EngineLoad(40, 10, 0), held_back=True) == 2
    assert AIMD.next_limit(40, EngineLoad(40, 1, 0), held_back=True) == 40  # one waits its turn


def test_a_limit_lets_in_as_many_as_it_says_in_order_and_follows_a_resize():
    async def scenario():
        limit, entered, most = Limit(2), [], 0
        leave = asyncio.Event()

        async def work(name):
            nonlocal most
            async with limit:
                entered.append(name)
                most = max(most, limit.in_use)
                await leave.wait()

        tasks = [asyncio.ensure_future(work(i)) for i in range(6)]
        await asyncio.sleep(0.01)
        assert entered == [0, 1] and len(limit._waiters) == 4
        tasks[2].cancel()
        limit.resize(3)
        await asyncio.sleep(0.01)
        assert entered == [0, 1, 3]
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert entered == [0, 1, 3, 4, 5] and most == 3 and limit.in_use == 0
        assert tasks[2].cancelled()

    asyncio.run(scenario())


def test_a_waiter_cancelled_in_the_moment_it_is_let_in_gives_its_slot_on():
    async def scenario():
        limit = Limit(1)
        await limit.__aenter__()
        first, second = (asyncio.ensure_future(limit.__aenter__()) for _ in range(2))
        await asyncio.sleep(0)
        await limit.__aexit__()
        first.cancel()
        await asyncio.wait_for(second, PATIENCE_S)
        assert limit.in_use == 1

    asyncio.run(scenario())


def test_loads_are_summed_and_an_engine_that_is_gone_is_left_out():
    with FakeEngine() as engine:
        engine.waiting, engine.load = 3, {"num_running_reqs": 5, "queues": {"retracted": 2}}
        load = run(read_loads([engine.url, engine.url, "http://127.0.0.1:9"]))
        assert load == EngineLoad(10, 6, 4)
    assert run(read_loads(["http://127.0.0.1:9"])) is None


def limit_of(args):
    async def ask():
        return GenerateState(args).semaphore.limit

    return run(ask())


def test_the_rollout_finds_the_load_that_the_engine_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(concurrency, "POLL_INTERVAL_S", 0.02)
    with FakeEngine(lambda payload, number: {"delay_s": 0.05}) as engine:
        flags = "--adaptive-concurrency", "--sglang-server-concurrency", "32", "--rollout-batch-size", "60"
        args = make_args(tmp_path, engine, *flags, "--global-batch-size", "120", prompts=60)
        source = make_source(args)
        generate_rollout(args, 0, source)
        grown = limit_of(args)
        assert 8 < grown <= 32 and 8 < engine.most_running <= 32
        engine.waiting = 50
        generate_rollout(args, 1, source)
        assert limit_of(args) < grown
    assert_conserved(source)


def test_without_the_flag_the_limit_stays(tmp_path):
    args = make_args(tmp_path)
    assert type(concurrency.make_limit(args, 7)) is Limit


def test_requests_wait_while_those_in_flight_come_to_too_many_tokens():
    async def scenario():
        limit, entered = Limit(10), []

        async def ask(name, tokens, leave):
            async with limit.holding(tokens):
                entered.append(name)
                await leave.wait()

        leaves = {name: asyncio.Event() for name in "abcde"}
        sizes = {"a": 6, "b": 5, "c": 4, "d": 50, "e": 1}
        tasks = {name: asyncio.ensure_future(ask(name, sizes[name], leaves[name])) for name in "abcde"}
        await asyncio.sleep(0)
        assert entered == ["a"]  # c would fit, but b came before it
        tasks["b"].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert entered == ["a", "c"] and limit.in_use == 10
        for name in "ac":
            leaves[name].set()
            await tasks[name]
        await asyncio.sleep(0)
        assert entered == ["a", "c", "d"]  # larger than the cap: alone
        leaves["d"].set()
        leaves["e"].set()
        await asyncio.gather(tasks["d"], tasks["e"])
        assert entered == ["a", "c", "d", "e"] and limit.in_use == 0

    run(scenario())


def test_a_rollout_keeps_within_its_tokens_in_flight(tmp_path):
    def in_company(payload, number):  # the first wait for each other, however late one comes
        return {"delay_s": 0.02, "until": lambda: engine.most_running >= 2}

    with FakeEngine(in_company) as engine:
        args = make_args(tmp_path, engine, "--max-tokens-in-flight", "25")  # two of 2 + 8 tokens
        source = make_source(args)
        generate_rollout(args, 0, source)
    assert engine.most_running == 2
    assert_conserved(source)
