"""Fills one training batch: starts groups, collects them as they finish, and ends the rest.

Groups that are still in flight when the batch is full return to the data source; with `--partial-rollout`
they keep the tokens that they have.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.collection.collector import Collector, Ticket
from slime.rollout.data_source import take_groups
from slime.rollout.generation.scope import RequestScope, current_scope
from slime.rollout.prompt_groups import Group, copy_group, is_scored, next_attempt
from slime.utils.errors import RunStopped
from slime.utils.types import flatten_samples

DISCARD_GRACE_S = 2.0  # for engines to confirm that discarded work has ended
ABORT_GRACE_S = 30.0  # for aborted work that will be kept to return


class BatchCollector(Collector):
    """Collects one rollout. `start_group` generates and scores a group; `abort_requests` aborts them all."""

    def __init__(
        self,
        args: PluginArgs,
        rollout_id: int,
        data_source: Any,
        start_group: Callable[[Group], Coroutine[Any, Any, Group]],
        abort_requests: Callable[[], Coroutine[Any, Any, None]],
    ):
        super().__init__(args, rollout_id, data_source, tickets={}, news=asyncio.Event())
        self.start_group, self.abort_requests = start_group, abort_requests
        self._scope = current_scope() or RequestScope()

    async def collect(self) -> None:
        async with self._accounted():
            while len(self.kept) < self.target:
                while self._remaining < self.target:
                    for group in self._take_groups():
                        number, origin, scope = self.counts["issued"], copy_group(group), self._scope.child()
                        self.counts["issued"] += 1
                        with scope.entered():  # the task inherits it
                            task = asyncio.ensure_future(self.start_group(group))
                        self._tickets[number] = Ticket(number, origin, task, scope)
                        task.add_done_callback(lambda _: self._news.set())
                self._decide(await self._next_done())
            self._return_groups(await self._drain())

    def _take_groups(self) -> list[Group]:
        groups = take_groups(self.data_source, self.args, self.args.over_sampling_batch_size or self.target)
        if not groups:
            there = f"{self._remaining} of --rollout-batch-size {self.target} are there"
            hint = "Let get_samples continue with a new epoch, or lower --num-rollout."
            raise RunStopped(f"the data source gave no groups: {there}. {hint}")
        return groups

    async def _drain(self) -> list[Group]:
        """End what is in flight, and return it for the data source; wait only for work that is kept."""
        tickets = list(self._tickets.values())
        running = [t.task for t in tickets if not t.task.done()]
        if self._keeps_work and running:
            await self.abort_requests()
            await asyncio.wait(running, timeout=ABORT_GRACE_S)
            await _cancel(running)
        elif running:
            await self._discard(running)
        groups = [self._worth_keeping(ticket) for ticket in tickets]
        for ticket, group in zip(tickets, groups, strict=True):
            if not is_scored(group):
                self.waste.restarted("aborted", ticket.origin, group, ticket.scope)
        self._tickets.clear()
        return sorted(groups, key=lambda group: not is_scored(group))  # finished ones first; it is stable

    async def _discard(self, running: list[asyncio.Task[Group]]) -> None:
        """Abort all requests, wait briefly for their token counts, then cancel the tasks."""
        rids = self._scope.rids.copy()
        if await _briefly(self.abort_requests()):
            await self._scope.answered(rids, DISCARD_GRACE_S)
        left = bool(self._scope.rids)  # of generate functions that ignore the end of the rollout
        again = asyncio.ensure_future(self.abort_requests()) if left else None
        await asyncio.sleep(0)  # read the ids before the tasks remove them
        await _cancel(running)
        if again is not None:
            await _briefly(again)

    @property
    def _keeps_work(self) -> bool:
        # How far aborted work came depends on timing, so a deterministic run starts it again.
        return self.args.partial_rollout and not self.args.deterministic_mode

    def _worth_keeping(self, ticket: Ticket) -> Group:
        task = ticket.task
        if task.cancelled() or task.exception() is not None:
            return ticket.origin
        group, args = task.result(), self.args
        if any(s.reward_failure is not None for s in flatten_samples(group)):
            return next_attempt(ticket.origin)
        if is_scored(group) and not (args.deterministic_mode or args.mask_offpolicy_in_partial_rollout):
            return self._stamp(group)
        return self._resumable(group, ticket.origin) if self._keeps_work else ticket.origin

    async def _end_all(self) -> list[Group]:
        tickets = list(self._tickets.values())
        self._tickets.clear()
        await _cancel([ticket.task for ticket in tickets])
        return [ticket.origin for ticket in tickets]


async def _cancel(tasks: list[asyncio.Task[Group]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _briefly(abort: Awaitable[None]) -> bool:
    """Give engines a moment to end discarded work, and return whether that was enough; else it continues."""
    task = asyncio.ensure_future(abort)
    await asyncio.wait([task], timeout=DISCARD_GRACE_S)
    if task.done():
        task.result()
    return task.done()
