"""Fill one training batch: start groups, collect them as they finish, and end what is left over.

What is still in flight when the batch is full returns to the data source, with `--partial-rollout` together
with the tokens it has.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from slime.arguments import PluginArgs
from slime.liveness import waits
from slime.rollout.collection.collector import Collector, Ticket
from slime.rollout.data_source import take_groups
from slime.rollout.generation.scope import RequestScope, current_scope
from slime.rollout.prompt_groups import Group, begin_again, copy_group, is_scored
from slime.utils.errors import RunStopped
from slime.utils.types import flatten_samples

logger = logging.getLogger(__name__)

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
        dynamic_filter: Callable[..., Any] | None,
    ):
        super().__init__(args, rollout_id, data_source, dynamic_filter, tickets={})
        self.start_group, self.abort_requests = start_group, abort_requests
        self._scope = current_scope() or RequestScope()
        self._done: asyncio.Queue[Ticket] = asyncio.Queue()
        self._waiting: dict[int, Ticket] = {}  # done before an earlier one (deterministic mode)
        self._num_issued = 0
        self._next_number = 0

    async def _fill_batch(self) -> None:
        while len(self.kept) < self.target:
            while self._remaining < self.target:
                for group in self._take_groups():
                    self._start(group)
            self._decide(await self._next_done())
        await self.drain()

    def _take_groups(self) -> list[Group]:
        groups = take_groups(self.data_source, self.args, self.args.over_sampling_batch_size or self.target)
        if not groups:
            raise RunStopped(
                f"the data source gave no groups: {self._remaining} of --rollout-batch-size {self.target} "
                "are there. Let get_samples continue with a new epoch, or lower --num-rollout."
            )
        return groups

    def _start(self, group: Group) -> None:
        number, self._num_issued = self._num_issued, self._num_issued + 1
        self.counts["issued"] += 1
        origin, scope = copy_group(group), self._scope.child()
        with scope.entered():  # the task inherits it
            ticket = Ticket(number, origin, asyncio.ensure_future(self.start_group(group)), scope)
        self._tickets[number] = ticket
        ticket.task.add_done_callback(lambda _: self._done.put_nowait(ticket))

    async def _next_done(self) -> Ticket:
        """Return the next group to decide: the first to finish, or in deterministic mode the first issued."""
        in_flight = len(self._tickets) - len(self._waiting)
        with waits.waiting(f"a group ({in_flight} in flight, {len(self.kept)} kept)", owner="rollout"):
            return await self._next_in_order()

    async def _next_in_order(self) -> Ticket:
        if not self.args.deterministic_mode:
            return await self._done.get()
        while self._next_number not in self._waiting:
            ticket = await self._done.get()
            if not ticket.task.cancelled() and ticket.task.exception() is not None:
                return ticket  # it stops the run, so it does not wait for its turn
            self._waiting[ticket.number] = ticket
        self._next_number += 1
        return self._waiting.pop(self._next_number - 1)

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.number]

    async def drain(self) -> list[Group]:
        """End what is in flight and return it to the data source; wait only for work that is kept."""
        tickets = [self._tickets[number] for number in sorted(self._tickets)]
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
                self.waste.begun("aborted", ticket.origin, group, ticket.scope)
        groups.sort(key=lambda group: not is_scored(group))  # finished ones first; the sort is stable
        self._tickets.clear()
        self._give_back(groups)
        return groups

    async def _discard(self, running: list[asyncio.Task[Group]]) -> None:
        """Abort all requests, wait briefly for their token counts, then cancel the tasks."""
        rids = self._scope.rids.copy()
        abort = asyncio.ensure_future(self.abort_requests())
        await self._briefly(abort)
        if abort.done():
            await self._scope.answered(rids, DISCARD_GRACE_S)
        again = None
        if self._scope.rids:  # of generate functions that ignore the end of the rollout
            again = asyncio.ensure_future(self.abort_requests())
            await asyncio.sleep(0)  # read the ids before the tasks remove them
        await _cancel(running)
        if again is not None:
            await self._briefly(again)

    async def _briefly(self, abort: asyncio.Future[None]) -> None:
        """Give engines a moment to end discarded work; a longer abort continues in the background."""
        await asyncio.wait([abort], timeout=DISCARD_GRACE_S)
        if abort.done():
            abort.result()
        else:
            abort.add_done_callback(_log_late_failure)

    @property
    def _keeps_work(self) -> bool:
        # How far aborted work came depends on timing, so a deterministic run starts it again.
        return self.args.partial_rollout and not self.args.deterministic_mode

    def _worth_keeping(self, ticket: Ticket) -> Group:
        task = ticket.task
        if task.cancelled() or task.exception() is not None:
            return ticket.origin
        group = task.result()
        if any(s.reward_failure is not None for s in flatten_samples(group)):
            return begin_again(ticket.origin)
        if (
            is_scored(group)
            and not self.args.deterministic_mode
            and not self.args.mask_offpolicy_in_partial_rollout
        ):
            return self._stamp(group)
        return self._resumable(group, ticket.origin) if self._keeps_work else ticket.origin

    async def _end_all(self) -> list[Group]:
        tickets = [self._tickets.pop(number) for number in sorted(self._tickets)]
        await _cancel([t.task for t in tickets])
        return [ticket.origin for ticket in tickets]


async def _cancel(tasks: list[asyncio.Task[Group]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _log_late_failure(abort: asyncio.Future[None]) -> None:
    if not abort.cancelled() and abort.exception() is not None:
        logger.warning("an abort failed: %s", abort.exception())
