"""Run coroutines together so that a failure leaves none of them behind."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def all_or_none(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order; when one fails, or the caller is cancelled, the others are stopped first."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
