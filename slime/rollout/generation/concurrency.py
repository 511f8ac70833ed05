"""The limit on requests or tokens in flight."""

import asyncio
import collections
import contextlib


class Limit:
    """A first-in, first-out semaphore of which a caller may take several slots at once.

    A count above the limit waits until nothing else is in use.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.in_use = 0
        self._waiters: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    async def __aenter__(self) -> None:
        await self.enter(1)

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    async def enter(self, count: int) -> None:
        """Take `count` slots, all or none; each is returned by `leave`."""
        if not self._waiters and self._fits(count):
            self.in_use += count
            return
        entry = (count, asyncio.get_running_loop().create_future())
        self._waiters.append(entry)
        try:
            await entry[1]  # whoever wakes it has counted its slots
        except asyncio.CancelledError:
            if entry[1].cancelled():
                with contextlib.suppress(ValueError):  # `_wake` has removed it already
                    self._waiters.remove(entry)
                self._wake()  # later ones may need fewer
            else:  # the slots were ours already
                self.leave(count)
            raise

    def leave(self, count: int = 1) -> None:
        self.in_use -= count
        self._wake()

    def _fits(self, count: int) -> bool:
        return self.in_use == 0 or self.in_use + count <= self.limit

    def _wake(self) -> None:
        while self._waiters and self._fits(self._waiters[0][0]):
            count, future = self._waiters.popleft()
            if not future.done():
                self.in_use += count
                future.set_result(None)
