"""What every engine behind the protocol must do when requests are ended, by id or by how ids begin."""

import asyncio

import pytest
from engine_under_test import met

from slime.utils import http_utils
from slime.utils.async_utils import run

PROMPT = [10, 20, 30, 40, 50]
LONG, SHORT = 450, 60


async def asked(engine, rids, **sampling):
    """Tasks of requests under these ids, each of which has made a few tokens."""
    tasks = {
        rid: asyncio.create_task(engine.agenerate(PROMPT, rid=rid, ignore_eos=True, **sampling))
        for rid in rids
    }
    await engine.running(tokens=5 * len(tasks))
    return tasks


def test_a_scope_is_ended_by_one_call_where_the_dialect_says_so_and_others_live(engine):
    """Both ways: an engine that learns it needs another row in the catalog."""

    async def scenario():
        long = await asked(engine, ("s.1.0-a", "s.1.1-b", "s.1.12.2-c"), max_new_tokens=LONG)
        others = await asked(engine, ("s.12.3-d", "s.2.4-e", "t.1.5-f"), max_new_tokens=SHORT)
        await engine.client.cancel_scope([engine.url], "s.1.")
        ended = {rid: await task for rid, task in others.items()}
        if not engine.can.dialect.aborts_by_prefix:
            await engine.client.cancel([engine.url], list(long))
        cut = {rid: await task for rid, task in long.items()}
        if engine.can.dialect.aborts_by_prefix:
            met({made.finish for made in cut.values()} == {"abort"})
        else:
            met(all(len(made.ids) > SHORT / 2 for made in cut.values()))
        return ended, cut

    ended, cut = engine.meet(scenario)
    assert {rid: len(made.ids) for rid, made in ended.items()} == dict.fromkeys(ended, SHORT)
    assert all(made.ids for made in cut.values())


def test_an_abort_by_id_ends_that_request_alone_where_ids_could_be_taken_for_a_beginning(engine):
    engine.need(engine.can.dialect.aborts_by_prefix, "ids that are compared as a whole")

    async def scenario():
        tasks = await asked(engine, ("s.1.0-a", "s.1.0-aa"), max_new_tokens=LONG)
        await engine.client.cancel([engine.url], ["s.1.0-a", "s.1."])
        made = {rid: await task for rid, task in tasks.items()}
        met(made["s.1.0-a"].finish == "abort")
        return made

    made = engine.meet(scenario)
    assert made["s.1.0-aa"].finish == "length" and len(made["s.1.0-aa"].ids) == LONG


@pytest.mark.parametrize("body", [{"rid": "", "prefix": True}, {"prefix": True}, {"rid": "a", "prefix": 1}])
def test_an_abort_that_could_mean_everything_is_refused(engine, body):
    engine.need(engine.can.dialect.aborts_by_prefix and engine.is_strict, "aborts of a scope")
    with pytest.raises(http_utils.HttpError) as refused:
        run(http_utils.post(f"{engine.url}/abort_request", body, max_retries=0))
    assert refused.value.status == 400
