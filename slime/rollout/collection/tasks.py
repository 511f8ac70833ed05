"""Run coroutines together so that a failure leaves none of them behind."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def all_or_none(coroutines: Iterable[Coroutine]) -> list[Any]:
    """Results in order; when one fails (or the caller is cancelled)
    the others are stopped before that rises.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
