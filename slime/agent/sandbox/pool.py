"""Opens sandboxes from a pool, which starts local ones in advance so that episodes need not wait.

A sandbox is used once, so no episode sees the files of another. A pool belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

from slime.agent.sandbox.base import Limits, Sandbox, SandboxError
from slime.agent.sandbox.local import LocalSandbox
from slime.catalog.sandboxes import SANDBOXES
from slime.utils.misc import load_function


class BoxPool:
    """Keeps `num_ready` started sandboxes; at most `num_boxes` are in use at a time, further requests wait.

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
        self._make = make or (lambda: LocalSandbox(limits=limits, isolation=isolation))
        self._num_ready = num_ready
        self._slots = asyncio.Semaphore(num_boxes)
        self._ready: collections.deque[asyncio.Task[LocalSandbox]] = collections.deque()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> BoxPool:
        """Start sandboxes ahead; raises the reason if none starts."""
        self._refill()
        await asyncio.gather(*self._ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the waiting sandboxes, and wait until all have ended."""
        waiting, self._num_ready = list(self._ready), 0
        self._ready.clear()
        for task in waiting:
            with contextlib.suppress(SandboxError):
                await (await task).close()
        await asyncio.gather(*self._closing)

    @contextlib.asynccontextmanager
    async def box(self) -> AsyncIterator[LocalSandbox]:
        """Yield a fresh sandbox; it is ended afterwards, in the background."""
        async with self._slots:
            sandbox = await self._take()
            try:
                yield sandbox
            finally:
                task = asyncio.create_task(sandbox.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def _take(self) -> LocalSandbox:
        while self._ready:
            task = self._ready.popleft()
            self._refill()
            sandbox = await task
            if sandbox.is_open:  # one that waited may have been killed from outside
                return sandbox
            await sandbox.close()
        self._refill()
        return await self._make().start()

    def _refill(self) -> None:
        while len(self._ready) < self._num_ready:
            task = asyncio.create_task(self._make().start())
            # Whoever takes it raises its exception.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._ready.append(task)


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, BoxPool]] = weakref.WeakKeyDictionary()


def shared_pool(
    limits: Limits | None = None, *, num_boxes: int = 32, isolation: str | None = None
) -> BoxPool:
    """Return this event loop's pool of sandboxes with these limits and walls; it ends with the process."""
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    key = (limits or Limits(), isolation)
    if key not in pools:
        pools[key] = BoxPool(num_boxes=num_boxes, limits=key[0], isolation=isolation)
    return pools[key]


@contextlib.asynccontextmanager
async def open_sandbox(
    kind: str = "local", *, image: str | None = None, limits: Limits | None = None, num_boxes: int = 32
) -> AsyncIterator[Sandbox]:
    """Yield a fresh sandbox of the kind that `--sandbox` names, and end it afterwards.

    `limits` apply to a local sandbox; those of a vendor's are set by its image.

    Example: `async with open_sandbox(args.sandbox, image=args.sandbox_image) as box: await box.exec("ls")`.
    """
    if kind not in SANDBOXES:
        raise ValueError(f"--sandbox is {kind!r}; choose from {', '.join(SANDBOXES)}")
    row = SANDBOXES[kind]
    if row.is_local:
        async with shared_pool(limits, num_boxes=num_boxes, isolation=row.isolation).box() as box:
            yield box
    else:
        async with load_function(row.make)(image) as remote:
            yield remote
