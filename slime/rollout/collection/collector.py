"""Fill one training batch: issue groups, decide about each finished one, and account for all of them.

Consumes groups from the data source, produces `kept`; waits only for the next finished group. Every group it
took ends in exactly one place: the batch, the filter's count, the failure count, or back in the buffer.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.data_source import DataSource, take_groups
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.generation.requests import PromptError
from slime.rollout.groups import (
    Group,
    attempt_of,
    begin_again,
    copy_group,
    describe,
    describe_fully,
    first_sample,
    is_finished,
    is_scored,
)
from slime.utils.errors import RunStopped
from slime.utils.http_utils import HttpError
from slime.utils.loop_watch import loop_watch
from slime.utils.plugin_errors import plugin_call
from slime.utils.types import RewardFailure, Sample, flatten_samples

logger = logging.getLogger(__name__)

MAX_FAILED_IN_A_ROW = 32  # groups; then it is the engines, not the prompts
DISCARD_GRACE_S = 2.0  # how long engines may take to confirm that discarded work is ended
ABORT_GRACE_S = 30.0  # how long aborted work that will be kept may take to come back


class GroupFailed(RunStopped):
    """A group could not be generated or scored within its attempts."""


def is_permanent(error: BaseException) -> bool:
    """Whether it lies in the request itself: another attempt would fail in the same way."""
    return isinstance(error, PromptError) or (isinstance(error, HttpError) and 400 <= error.status < 500)


@dataclass(eq=False)
class Ticket:
    """One group in flight. `origin` is a copy from before generation:
    what goes back when the work is thrown away.
    """

    number: int  # order of issue
    origin: Group
    task: asyncio.Task


class BatchCollector:
    """One rollout. `start_group` generates and scores a group;
    `abort_requests` ends what engines are doing for it.
    """

    def __init__(
        self,
        args: PluginArgs,
        rollout_id: int,
        data_source: Any,
        start_group: Callable[[Group], Awaitable[Group]],
        abort_requests: Callable[[], Awaitable[None]],
        dynamic_filter: Callable | None,
    ):
        self.args, self.rollout_id, self.data_source = args, rollout_id, data_source
        self.start_group, self.abort_requests, self.dynamic_filter = (
            start_group,
            abort_requests,
            dynamic_filter,
        )
        self.target = args.rollout_batch_size
        self.kept: list[Group] = []
        self.decided: list[Group] = []  # every group that reached the filter, dropped ones included
        self.counts: Counter[str] = Counter()
        self._drops = MetricGatherer()
        self._tickets: dict[int, Ticket] = {}  # issued and not decided, by number
        self._done: asyncio.Queue[Ticket] = asyncio.Queue()
        self._waiting: dict[int, Ticket] = {}  # done, but an earlier one is not (deterministic mode)
        self._num_issued = 0
        self._next_number = 0
        self._failed_in_a_row = 0

    async def collect(self) -> list[Group]:
        """The batch, sorted by sample index."""
        try:
            await self._fill_batch()
        except BaseException:
            await self._give_everything_back()
            raise
        self.kept.sort(key=lambda group: first_sample(group).index)
        self.decided.sort(key=lambda group: first_sample(group).index)
        self._settle(self.kept, "trained")
        return self.kept

    async def _fill_batch(self) -> None:
        while len(self.kept) < self.target:
            self._issue()
            self._decide(await self._next_done())
        await self.drain()

    def metrics(self) -> dict[str, Any]:
        return {
            **self._drops.collect(),
            **{f"rollout/groups/{name}": n for name, n in sorted(self.counts.items())},
        }

    # -- issue -----------------------------------------------------------------------------------------------

    @property
    def _remaining(self) -> int:
        """Groups that can still end up in the batch."""
        return len(self.kept) + len(self._tickets)

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
        ticket = Ticket(number, copy_group(group), asyncio.ensure_future(self.start_group(group)))
        self._tickets[number] = ticket
        ticket.task.add_done_callback(lambda _: self._done.put_nowait(ticket))

    # -- decide ----------------------------------------------------------------------------------------------

    async def _next_done(self) -> Ticket:
        """The next group to decide: the first to finish, or in
        deterministic mode the first that was issued.
        """
        if not self.args.deterministic_mode:
            return await self._done.get()
        while self._next_number not in self._waiting:
            ticket = await self._done.get()
            if not ticket.task.cancelled() and ticket.task.exception() is not None:
                return ticket  # it stops the run: no need to wait for its turn
            self._waiting[ticket.number] = ticket
        self._next_number += 1
        return self._waiting.pop(self._next_number - 1)

    def _decide(self, ticket: Ticket) -> None:
        error = ticket.task.exception()
        if error is not None:
            self._on_generation_failure(ticket, error)
            return
        self._failed_in_a_row = 0
        group = ticket.task.result()
        failure = next(
            (s.reward_failure for s in flatten_samples(group) if s.reward_failure is not None), None
        )
        if failure is not None:
            self._on_reward_failure(ticket, group, failure)
        elif any(s.status is Sample.Status.ABORTED for s in flatten_samples(group)):
            cause = f"the generate function gave up on {describe(group)} (a sample is aborted)"
            self._requeue(ticket, self._resumable(group, ticket.origin), cause)
        else:
            self._filter(ticket, group)

    def _filter(self, ticket: Ticket, group: Group) -> None:
        if len(group) != self.args.n_samples_per_prompt:
            raise ValueError(
                f"{describe(group)}: the group has {len(group)} entries, --n-samples-per-prompt is "
                f"{self.args.n_samples_per_prompt}."
            )
        self.decided.append(group)
        made = [s for s in flatten_samples(group) if s.status is not Sample.Status.FAILED]
        self.counts["samples_failed"] += len(flatten_samples(group)) - len(made)
        path = self.args.dynamic_sampling_filter_path
        option = "--dynamic-sampling-filter-path"
        with plugin_call(option, path, lambda: describe_fully(made)), loop_watch.step(f"{option} {path}"):
            output = call_dynamic_filter(self.dynamic_filter, self.args, made)
        if should_drop_dynamic_filter_output(
            output, remaining_batch_size=self._remaining, target_data_size=self.target
        ):
            self._drops.on_dynamic_filter_drop(output.reason)
            self._forget(ticket)
            self.counts["filtered"] += 1
            self._settle([group], "filtered", output.reason)
            if self.counts["filtered"] % (10 * self.target) == 0:
                logger.warning(
                    "rollout %d: %d groups were filtered so far", self.rollout_id, self.counts["filtered"]
                )
            return
        self._forget(ticket)
        self.kept.append(group)
        self.counts["kept"] += 1

    def _on_generation_failure(self, ticket: Ticket, error: BaseException) -> None:
        """--group-failure-action decides; groups that fail one
        after another are no matter of single groups.
        """
        action = self.args.group_failure_action
        self._failed_in_a_row += 1
        ours = isinstance(error, GroupFailed) or is_permanent(error)
        if not ours or action == "stop" or (action == "retry" and is_permanent(error)):
            raise error
        if self._failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            raise GroupFailed(f"{self._failed_in_a_row} groups in a row failed; the last: {error}") from error
        if action == "retry":
            self._requeue(ticket, ticket.origin, str(error))
            return
        # With "keep" nothing of the group is left to keep.
        logger.warning("dropped: %s", error)
        self._forget(ticket)
        self.counts["failed"] += 1
        self._settle([ticket.origin], "failed", "generation")

    def _on_reward_failure(self, ticket: Ticket, group: Group, failure: RewardFailure) -> None:
        action = self.args.reward_failure_action
        cause = f"the reward of {describe(group)} is {failure.kind}: {failure.reason}"
        self.counts[f"reward_{failure.kind}"] += 1
        if action == "stop":
            raise GroupFailed(f"{cause} (--reward-failure-action stop).")
        if action == "drop":
            logger.warning("dropped: %s", cause)
            self._forget(ticket)
            self.counts["failed"] += 1
            self._settle([group], "failed", f"reward_{failure.kind}")
            return
        hint = " Mend the reward, or let such groups go with --reward-failure-action drop."
        self._requeue(ticket, ticket.origin, cause, hint)

    def _requeue(self, ticket: Ticket, group: Group, cause: str, hint: str = "") -> None:
        attempts = attempt_of(first_sample(ticket.origin)) + 1
        allowed = self.args.group_max_attempts
        if attempts >= allowed:
            raise GroupFailed(f"{cause}; {attempts} attempts were made (--group-max-attempts).{hint}")
        logger.warning("generated again (attempt %d of %d): %s", attempts + 1, allowed, cause)
        self._forget(ticket)
        self._give_back([begin_again(group)])

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.number]

    # -- give back -------------------------------------------------------------------------------------------

    async def drain(self) -> list[Group]:
        """End what is still in flight and return it to the data
        source; waits only for work that will be kept.
        """
        tickets = [self._tickets[number] for number in sorted(self._tickets)]
        running = [t.task for t in tickets if not t.task.done()]
        if self._keeps_work and running:
            await self.abort_requests()
            await asyncio.wait(running, timeout=ABORT_GRACE_S)
            await self._cancel(running)
        elif running:
            # The ids are noted before the tasks let go of them, and sent
            # after: a cancelled task resends nothing.
            abort = asyncio.ensure_future(self.abort_requests())
            await asyncio.sleep(0)
            await self._cancel(running)
            await self._briefly(abort)
        groups = [self._worth_keeping(ticket) for ticket in tickets]
        groups.sort(key=lambda group: not is_scored(group))  # finished ones first; the sort is stable
        self._tickets.clear()
        self._give_back(groups)
        return groups

    async def _briefly(self, abort: asyncio.Future) -> None:
        """What engines still do about discarded work is not waited
        for; the abort goes on by itself if it must.
        """
        await asyncio.wait([abort], timeout=DISCARD_GRACE_S)
        if abort.done():
            abort.result()
        else:
            abort.add_done_callback(_log_late_failure)

    @property
    def _keeps_work(self) -> bool:
        # How far aborted work came is a matter of timing, so a deterministic run begins it again.
        return self.args.partial_rollout and not self.args.deterministic_mode

    async def _cancel(self, tasks: list[asyncio.Task]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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

    def _resumable(self, group: Group, origin: Group) -> Group:
        """Keep what can be continued. A fan-out that was cut short cannot: its prompt begins again."""
        if not self.args.partial_rollout or len(group) != len(origin):
            return origin
        pairs = zip(group, origin, strict=True)
        return self._stamp(
            [old if isinstance(new, list) and not is_finished(new) else new for new, old in pairs]
        )

    def _stamp(self, group: Group) -> Group:
        for sample in flatten_samples(group):
            if sample.response_length > 0:
                sample.metadata.setdefault("start_rollout_id", self.rollout_id)
        return group

    def _give_back(self, groups: list[Group]) -> None:
        if not groups:
            return
        try:
            self.data_source.add_samples(groups)
            self.counts["returned"] += len(groups)
        except NotImplementedError:
            logger.warning("the data source takes nothing back: %d groups are given up", len(groups))
            self.counts["failed"] += len(groups)
            self._settle(groups, "failed", "no_buffer")

    async def _give_everything_back(self) -> None:
        """The rollout failed: nothing was trained, so what was kept returns too."""
        tickets = [self._tickets.pop(number) for number in sorted(self._tickets)]
        await self._cancel([t.task for t in tickets])
        kept, self.kept = self.kept, []
        self._give_back(kept + [ticket.origin for ticket in tickets])

    def _settle(self, groups: list[Group], outcome: str, reason: str | None = None) -> None:
        if isinstance(self.data_source, DataSource):
            self.data_source.settle(groups, outcome, reason)


def _log_late_failure(abort: asyncio.Future) -> None:
    if not abort.cancelled() and abort.exception() is not None:
        logger.warning("an abort failed: %s", abort.exception())
