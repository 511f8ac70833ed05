"""A pool of boxes that are started ahead, so that an episode does not wait for one.

A box is used once: what one episode leaves behind, no other sees. The pool belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import weakref
from collections.abc import AsyncIterator, Callable

from slime.agent.sandbox.base import Limits, SandboxError
from slime.agent.sandbox.local import LocalSandbox

logger = logging.getLogger(__name__)


class BoxPool:
    """`num_ready` boxes wait started; at most `num_boxes` are in use at a time, others wait their turn.

    Example: `async with BoxPool(num_ready=4) as pool: async with pool.box() as box: await box.exec("true")`.
    """

    def __init__(
        self,
        make: Callable[[], LocalSandbox] | None = None,
        *,
        num_ready: int = 2,
        num_boxes: int = 32,
        limits: Limits | None = None,
        isolation: str | None = None,
    ):
        if num_ready < 0 or num_boxes < 1:
            raise ValueError(
                f"a pool needs num_ready >= 0 and num_boxes >= 1, not {num_ready} and {num_boxes}"
            )
        self._make = make or (lambda: LocalSandbox(limits=limits, isolation=isolation))
        self._num_ready = num_ready
        self._slots = asyncio.Semaphore(num_boxes)
        self._ready: collections.deque[asyncio.Task[LocalSandbox]] = collections.deque()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> BoxPool:
        await self.warm()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def warm(self) -> None:
        """Start boxes ahead; returns when they are ready, or with the reason why none starts."""
        self._refill()
        await asyncio.gather(*self._ready)

    @contextlib.asynccontextmanager
    async def box(self) -> AsyncIterator[LocalSandbox]:
        """A fresh box, ended afterwards beside the caller's work."""
        async with self._slots:
            box = await self._take()
            try:
                yield box
            finally:
                task = asyncio.create_task(box.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def _take(self) -> LocalSandbox:
        while self._ready:
            task = self._ready.popleft()
            self._refill()
            box = await task
            if box.is_open:  # one that waited may have been killed from outside
                return box
            await box.close()
        self._refill()
        return await self._make().start()

    def _refill(self) -> None:
        while len(self._ready) < self._num_ready:
            task = asyncio.create_task(self._make().start())
            task.add_done_callback(_seen)
            self._ready.append(task)

    async def close(self) -> None:
        """End the boxes that wait, and wait for those that are ending."""
        waiting, self._num_ready = list(self._ready), 0
        self._ready.clear()
        for task in waiting:
            with contextlib.suppress(SandboxError):
                await (await task).close()
        await asyncio.gather(*self._closing)


def _seen(task: asyncio.Task[LocalSandbox]) -> None:
    if not task.cancelled():
        task.exception()  # told to whoever takes the box


_Pools = dict[tuple[Limits, str | None], BoxPool]
_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pools] = weakref.WeakKeyDictionary()


def shared_pool(
    limits: Limits | None = None, *, num_boxes: int = 32, isolation: str | None = None
) -> BoxPool:
    """Return this event loop's pool of sandboxes with these limits and walls; it ends with the process."""
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    key = (limits or Limits(), isolation)
    if key not in pools:
        pools[key] = BoxPool(num_boxes=num_boxes, limits=key[0], isolation=isolation)
    return pools[key]
