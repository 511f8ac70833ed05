"""What ending a rollout, a pool or a group costs in calls to engines, and what it leaves alone."""

import asyncio

import pytest
from fake_engine import FakeEngine
from patience import eventually
from rollout_helpers import assert_conserved, make_args, make_source

from slime.rollout.base_types import call_rollout_fn
from slime.rollout.fully_async_rollout import generate_rollout_fully_async, stop_pool
from slime.rollout.generation.scope import RequestScope
from slime.rollout.sglang_rollout import GenerateState, abort_scope
from slime.utils.async_utils import run
from slime.wire.protocol import GenerateRequest, SamplingParams

NUM_ENGINES = 64


def hold_after(count):
    return lambda payload, number: {"hold": True, "tokens": [33]} if number >= count else None


@pytest.mark.parametrize(
    ("kind", "calls"),
    [("embedded", NUM_ENGINES), pytest.param("sglang", 20 * NUM_ENGINES, id="sglang, two groups of ten")],
)
def test_ending_a_pool_is_one_call_to_each_engine_that_knows_scopes(tmp_path, kind, calls):
    with FakeEngine(hold_after(20)) as engine:
        args = make_args(
            tmp_path, engine, "--rollout-batch-size", "2", "--n-samples-per-prompt", "10", num_rollout=9
        )
        args.rollout_engine = kind  # not by its flag, which would look for an installed one
        args.engine_urls, args.max_weight_staleness = (engine.url,) * NUM_ENGINES, 1
        source = make_source(args)
        call_rollout_fn(generate_rollout_fully_async, args, 0, source, evaluation=False)
        eventually(lambda: engine.running == 20)
        stop_pool(source)
        held = {request["rid"] for request in engine.requests[20:]}
        assert engine.aborted == held and len(held) == 20
        assert len(engine.aborts) == calls
        assert all(a.get("prefix", False) is (kind == "embedded") for a in engine.aborts)
    assert_conserved(source)


def test_ids_that_a_function_chose_itself_are_ended_one_by_one_and_others_live(tmp_path):
    async def scenario(args):
        state, scope = GenerateState(args), RequestScope()

        async def ask(rid, scope):
            request = GenerateRequest([1, 2], SamplingParams(max_new_tokens=8), rid=rid)
            with scope.entered():
                async with state.sending(request):
                    return await state.client.generate(request)

        part, other = scope.child(), RequestScope()
        ids = {"mine": scope, f"{scope.name}0-a": scope, f"{part.name}1-b": part, "mine too": other}
        tasks = {rid: asyncio.ensure_future(ask(rid, where)) for rid, where in ids.items()}
        while engine.running < len(ids):
            assert not any(task.done() for task in tasks.values()), "a request ended before its abort"
            await asyncio.sleep(0.01)
        await abort_scope(args, scope)
        *ended, alive = tasks.values()
        made = await asyncio.gather(*ended)
        assert not alive.done() and scope.rids == set()
        await abort_scope(args, other)
        return [*made, await alive], scope.name

    with FakeEngine(hold_after(0)) as engine:
        made, name = run(scenario(make_args(tmp_path, engine)))
    assert {answer.finish for answer in made} == {"abort"}
    assert engine.aborts == [{"rid": name, "prefix": True}, {"rid": "mine"}, {"rid": "mine too"}]


def test_no_scope_begins_with_the_name_of_another_but_that_of_its_whole():
    pool = RequestScope()
    groups = [pool.child() for _ in range(12)]
    spare = groups[1].child()
    for one in (pool, *groups, spare, RequestScope()):
        inside = [s for s in (pool, *groups, spare) if s.name.startswith(one.name)]
        wholes = {pool: [pool, *groups, spare], groups[1]: [groups[1], spare]}
        assert inside == wholes.get(one, [one] if one.name.startswith(pool.name) else [])
