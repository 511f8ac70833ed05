"""Limits on requests and tokens in flight, and a controller that adapts the limit to the engines' load.

The controller (--adaptive-concurrency) raises the limit step by step while requests wait here and none waits
at the engines, and lowers it by a factor as soon as engines queue or retract requests.
"""

import asyncio
import collections
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from slime.arguments import PluginArgs
from slime.utils import http_utils

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0


class Limit:
    """A first-in, first-out semaphore whose size can change while it is held.

    `enter(count)` takes all its slots at once. A count above the limit waits until nothing else is in use.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.in_use = 0
        self._waiters: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    async def __aenter__(self) -> None:
        await self.enter(1)

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    @contextlib.asynccontextmanager
    async def holding(self, count: int) -> AsyncIterator[None]:
        await self.enter(count)
        try:
            yield
        finally:
            self.leave(count)

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

    def resize(self, limit: int) -> None:
        """Change the limit. It takes effect as slots are returned; nothing that runs is interrupted."""
        self.limit = limit
        self._wake()

    def _fits(self, count: int) -> bool:
        return self.in_use == 0 or self.in_use + count <= self.limit

    def _wake(self) -> None:
        while self._waiters and self._fits(self._waiters[0][0]):
            count, future = self._waiters.popleft()
            if not future.done():
                self.in_use += count
                future.set_result(None)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of all engines together. `retracted`: requests that lost their KV cache to lack of memory."""

    running: int
    waiting: int
    retracted: int

    def __add__(self, other: "EngineLoad") -> "EngineLoad":
        total = self.retracted + other.retracted
        return EngineLoad(self.running + other.running, self.waiting + other.waiting, total)


@dataclass(frozen=True, slots=True)
class Aimd:
    """Additive increase, multiplicative decrease, between `floor` and `ceiling`."""

    floor: int
    ceiling: int
    step: int
    shrink: float = 0.75
    waiting_share: float = 0.05  # waiting requests per running one that are only a scheduler's turn

    def next_limit(self, limit: int, load: EngineLoad, *, held_back: bool) -> int:
        """Return the new limit. `held_back`: requests wait on this side, so more could be in flight."""
        if load.retracted > 0 or load.waiting > max(1, self.waiting_share * load.running):
            return max(self.floor, int(limit * self.shrink))
        if held_back and load.waiting == 0:
            return min(self.ceiling, limit + self.step)
        return limit


class AdaptiveLimit(Limit):
    """A limit that a task adapts while anything is in flight."""

    def __init__(self, aimd: Aimd, read_load: Callable[[], Awaitable[EngineLoad | None]], start: int):
        super().__init__(start)
        self._aimd, self._read_load = aimd, read_load
        self._watcher: asyncio.Task | None = None

    async def __aenter__(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.ensure_future(self._watch())
        await super().__aenter__()

    async def _watch(self) -> None:
        await asyncio.sleep(0)
        while self.in_use or self._waiters:
            load = await self._read_load()
            if load is not None:
                new = self._aimd.next_limit(self.limit, load, held_back=bool(self._waiters))
                if new != self.limit:
                    logger.debug("requests in flight: %d -> %d (%s)", self.limit, new, load)
                    self.resize(new)
            await asyncio.sleep(POLL_INTERVAL_S)


async def read_loads(urls: Sequence[str]) -> EngineLoad | None:
    """Return the sum over the engines that respond; None when none does."""
    answers = await asyncio.gather(*(_read_load(url) for url in urls))
    loads = [load for load in answers if load is not None]
    return sum(loads, EngineLoad(0, 0, 0)) if loads else None


async def _read_load(url: str) -> EngineLoad | None:
    try:
        answer = await http_utils.get(f"{url}/v1/loads?include=core,queues", timeout_s=5.0)
        ranks = answer["loads"]
        return EngineLoad(
            running=sum(rank["num_running_reqs"] for rank in ranks),
            waiting=sum(rank["num_waiting_reqs"] for rank in ranks),
            retracted=sum((rank.get("queues") or {}).get("retracted") or 0 for rank in ranks),
        )
    except (http_utils.HttpError, KeyError, TypeError) as error:
        logger.debug("engine %s did not report its load: %s", url, error)
        return None


def make_limit(args: PluginArgs, ceiling: int) -> Limit:
    """Return the limit of a run: fixed at `ceiling`, or with --adaptive-concurrency adapted below it."""
    if not args.adaptive_concurrency:
        return Limit(ceiling)
    engines = max(1, args.rollout_num_engines)
    aimd = Aimd(floor=engines, ceiling=ceiling, step=max(1, min(8 * engines, ceiling // 8)))
    return AdaptiveLimit(aimd, lambda: read_loads(args.engine_urls), start=max(engines, ceiling // 4))
