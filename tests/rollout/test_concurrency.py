"""The limits on requests and tokens in flight."""

import asyncio

from fake_engine import FakeEngine
from patience import PATIENCE_S
from rollout_helpers import assert_conserved, make_args, make_source

from slime.rollout.generation.state import Limit
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run


def test_a_limit_lets_in_as_many_as_it_says_in_order():
    async def scenario():
        limit, entered, most = Limit(3), [], 0
        leave = asyncio.Event()

        async def work(name):
            nonlocal most
            async with limit:
                entered.append(name)
                most = max(most, limit.in_use)
                await leave.wait()

        tasks = [asyncio.ensure_future(work(i)) for i in range(6)]
        await asyncio.sleep(0.01)
        assert entered == [0, 1, 2] and len(limit._waiters) == 3
        tasks[3].cancel()
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert entered == [0, 1, 2, 4, 5] and most == 3 and limit.in_use == 0
        assert tasks[3].cancelled()

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


def test_requests_wait_while_those_in_flight_come_to_too_many_tokens():
    async def scenario():
        limit, entered = Limit(10), []

        async def ask(name, tokens, leave):
            await limit.enter(tokens)
            entered.append(name)
            await leave.wait()
            limit.leave(tokens)

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
