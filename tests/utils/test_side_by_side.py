"""`side_by_side`: what never waits is done in one task, what waits has tasks of its own; failures end all."""

import asyncio
from contextvars import ContextVar

import pytest

from slime.utils.async_utils import side_by_side

_mark: ContextVar[str] = ContextVar("mark", default="outside")


def test_work_that_never_waits_is_done_in_order_in_the_callers_task():
    async def main():
        own = asyncio.current_task()
        seen = []

        async def work(item):
            assert asyncio.current_task() is own
            seen.append(item)
            return item * 10

        assert await side_by_side(work, range(5)) == [0, 10, 20, 30, 40]
        assert seen == [0, 1, 2, 3, 4]

    asyncio.run(main())


def test_no_item_waits_for_another_that_waits():
    async def main():
        started, gate = [], asyncio.Event()

        async def work(item):
            started.append(item)
            if item == 4:
                gate.set()  # the last lets all others go on
            if item >= 2:
                await gate.wait()
            return item, _mark.get()

        _mark.set("inside")
        made = await asyncio.wait_for(side_by_side(work, range(5)), 60)
        assert made == [(item, "inside") for item in range(5)]
        assert sorted(started) == [0, 1, 2, 3, 4]

    asyncio.run(main())


@pytest.mark.parametrize("fails", [0, 3])
def test_a_failure_ends_the_others_at_once(fails):
    async def main():
        started, ended = [], []

        async def work(item):
            started.append(item)
            try:
                await asyncio.sleep(0)
                if item == fails:
                    raise KeyError(item)
                await asyncio.Event().wait()
            finally:
                ended.append(item)

        with pytest.raises(KeyError):
            await asyncio.wait_for(side_by_side(work, range(5)), 60)
        assert fails in started
        assert sorted(ended) == sorted(started)

    asyncio.run(main())


def test_a_cancelled_caller_leaves_nothing_behind():
    async def main():
        ended = []

        async def work(item):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(item)

        task = asyncio.create_task(side_by_side(work, range(3)))
        while asyncio.all_tasks() - {asyncio.current_task(), task} == set():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(ended) == [0, 1, 2]

    asyncio.run(main())


def test_nothing_to_do_gives_nothing():
    async def work(item):
        return item

    assert asyncio.run(side_by_side(work, [])) == []
