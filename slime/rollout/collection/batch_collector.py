"""Fill one training batch in one go: issue groups, take them as they finish, and end what is left over.

Waits only for the next finished group. What is still in flight when the batch is full goes back to the data
source, with `--partial-rollout` as far as it came.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.collection.collector import Collector, Ticket
from slime.rollout.data_source import take_groups
from slime.rollout.generation.scope import RequestScope, current_scope
from slime.rollout.prompt_groups import Group, begin_again, copy_group, is_scored
from slime.utils import waits
from slime.utils.errors import RunStopped
from slime.utils.types import flatten_samples

logger = logging.getLogger(__name__)

DISCARD_GRACE_S = 2.0  # how long engines may take to confirm that discarded work is ended
ABORT_GRACE_S = 30.0  # how long aborted work that will be kept may take to come back


class BatchCollector(Collector):
    """One rollout: `start_group` generates and scores a group, `abort_requests` ends it at the engines."""

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
        self._waiting: dict[int, Ticket] = {}  # done, but an earlier one is not (deterministic mode)
        self._num_issued = 0
        self._next_number = 0

    async def _fill_batch(self) -> None:
        while len(self.kept) < self.target:
            self._issue()
            self._decide(await self._next_done())
        await self.drain()

    def _issue(self) -> None:
        while self._remaining < self.target:
            groups = take_groups(
                self.data_source, self.args, self.args.over_sampling_batch_size or self.target
            )
            if not groups:
                raise RunStopped(
                    f"the data source gave no groups: {self._remaining} of --rollout-batch-size "
                    f"{self.target} are there. "
                    "Let get_samples go on with a new epoch, or lower --num-rollout."
                )
            for group in groups:
                self._start(group)

    def _start(self, group: Group) -> None:
        number, self._num_issued = self._num_issued, self._num_issued + 1
        self.counts["issued"] += 1
        origin, scope = copy_group(group), self._scope.child()
        with scope.entered():  # the task inherits it
            ticket = Ticket(number, origin, asyncio.ensure_future(self.start_group(group)), scope)
        self._tickets[number] = ticket
        ticket.task.add_done_callback(lambda _: self._done.put_nowait(ticket))

    async def _next_done(self) -> Ticket:
        """The next group to decide: the first to finish, or in deterministic mode the first issued."""
        in_flight = len(self._tickets) - len(self._waiting)
        with waits.waiting(f"a group ({in_flight} in flight, {len(self.kept)} kept)", owner="rollout"):
            return await self._next_in_order()

    async def _next_in_order(self) -> Ticket:
        if not self.args.deterministic_mode:
            return await self._done.get()
        while self._next_number not in self._waiting:
            ticket = await self._done.get()
            if not ticket.task.cancelled() and ticket.task.exception() is not None:
                return ticket  # it stops the run: no need to wait for its turn
            self._waiting[ticket.number] = ticket
        self._next_number += 1
        return self._waiting.pop(self._next_number - 1)

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.number]

    async def drain(self) -> list[Group]:
        """End what is in flight and return it to the data source; waits only for work that is kept."""
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
        """Aborted requests come back with what was made of them, which is counted; then all is ended."""
        rids = self._scope.rids.copy()
        abort = asyncio.ensure_future(self.abort_requests())
        await self._briefly(abort)
        if abort.done():
            await self._scope.answered(rids, DISCARD_GRACE_S)
        again = None
        if self._scope.rids:  # of functions that do not look whether the rollout is over
            again = asyncio.ensure_future(self.abort_requests())
            await asyncio.sleep(0)  # the ids are noted before the tasks let go of them
        await _cancel(running)
        if again is not None:
            await self._briefly(again)

    async def _briefly(self, abort: asyncio.Future[None]) -> None:
        """Give engines a moment to end discarded work; an abort that takes longer goes on by itself."""
        await asyncio.wait([abort], timeout=DISCARD_GRACE_S)
        if abort.done():
            abort.result()
        else:
            abort.add_done_callback(_log_late_failure)

    @property
    def _keeps_work(self) -> bool:
        # How far aborted work came is a matter of timing, so a deterministic run begins it again.
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
