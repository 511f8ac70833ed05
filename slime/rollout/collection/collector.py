"""Decides which generated groups are trained on, and accounts for all of them.

A collector takes groups from the data source and fills `kept`. Every group ends in exactly one place: the
batch, the count of filtered groups, the count of failed groups, or the buffer.
"""

import abc
import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from slime.arguments import PluginArgs
from slime.catalog.limits import limit
from slime.liveness import waits
from slime.rollout import ledger
from slime.rollout.collection.waste import Waste, teaches_nothing
from slime.rollout.data_source import CountingJournal, DataSource
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.generation.generate_request import PromptError
from slime.rollout.generation.scope import RequestScope
from slime.rollout.prompt_groups import (
    Group,
    Outcome,
    attempt_of,
    describe,
    describe_fully,
    first_sample,
    index_of,
    is_finished,
    next_attempt,
)
from slime.utils.errors import RunStopped
from slime.utils.http_utils import HttpError
from slime.utils.machine.own_command import as_typed
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call
from slime.utils.reward_failure import RewardFailure
from slime.utils.types import Sample, flatten_samples

logger = logging.getLogger(__name__)

MAX_FAILED_IN_A_ROW = 32  # groups; then it is the engines, not the prompts
# Groups that a filter may drop before it keeps any; beyond that it would drop all of this policy.
MAX_DROPPED, MAX_DROPPED_BATCHES = 1000, 100

# Logged as 0 too, so that their curves have a value at every step; troubles are logged where they occur.
_ALWAYS_COUNTED = ("kept", "filtered", "returned")


class GroupFailed(RunStopped):
    """A group could not be generated or scored within its attempts."""


def is_permanent(error: BaseException) -> bool:
    """Return whether the request itself is at fault, so that a retry would fail in the same way."""
    return isinstance(error, PromptError) or (isinstance(error, HttpError) and 400 <= error.status < 500)


@dataclass(eq=False)
class Ticket:
    """One group in flight. `origin` is a copy from before generation, for when the work is discarded."""

    number: int  # order of issue
    origin: Group
    task: asyncio.Task[Group]
    scope: RequestScope  # its requests
    version: int | None = None  # the newest weights when it started, where that counts


class Collector(abc.ABC):
    """Collects one training batch from the groups in `tickets`, which subclasses start and end."""

    def __init__(
        self,
        args: PluginArgs,
        rollout_id: int,
        data_source: Any,
        tickets: dict[int, Ticket],
        news: asyncio.Event,
    ):
        self.args, self.rollout_id, self.data_source = args, rollout_id, data_source
        self.target = args.rollout_batch_size
        self.kept: list[Group] = []
        self.decided: list[Group] = []  # every group that reached the filter, dropped ones included
        self.counts: Counter[str] = Counter()
        self.waste = Waste()
        self._tickets = tickets  # issued and not decided, by order of issue
        self._news = news  # set when one of them is done
        self._drops = MetricGatherer()
        self._failed_in_a_row = 0

    @contextlib.asynccontextmanager
    async def _accounted(self) -> AsyncIterator[None]:
        """Account for every group, and sort the batch, when the block that fills it ends."""
        try:
            yield
        except BaseException:
            kept, self.kept = self.kept, []
            # Nothing was trained, so kept groups return too.
            self._return_groups(kept + await self._end_all())
            raise
        self.kept.sort(key=lambda group: index_of(first_sample(group)))
        self.decided.sort(key=lambda group: index_of(first_sample(group)))
        self._settle(self.kept, "trained")

    def metrics(self) -> dict[str, Any]:
        counts = dict.fromkeys(_ALWAYS_COUNTED, 0) | self.counts
        return {
            **self._drops.collect(),
            **{f"rollout/groups/{name}": n for name, n in sorted(counts.items())},
            **self.waste.metrics(self.kept),
        }

    @abc.abstractmethod
    async def collect(self) -> None:
        """Start groups and decide about finished ones until the batch is full."""

    @abc.abstractmethod
    async def _end_all(self) -> list[Group]:
        """End all work in flight; return the groups for the data source."""

    @property
    def _remaining(self) -> int:
        """Return how many groups can still end up in the batch."""
        return len(self.kept) + len(self._tickets)

    async def _next_done(self) -> Ticket:
        """Return the oldest finished group; in deterministic mode wait for the oldest of all."""
        while True:
            self._news.clear()
            for ticket in self._tickets.values():
                if ticket.task.done():
                    return ticket
                if self.args.deterministic_mode:
                    break
            in_flight = sum(not ticket.task.done() for ticket in self._tickets.values())
            what = f"a group ({in_flight} in flight, {len(self.kept)} kept)"
            with waits.waiting(what, owner="rollout"):
                await self._news.wait()

    def _decide(self, ticket: Ticket) -> None:
        error = ticket.task.exception()
        if error is not None:
            return self._on_generation_failure(ticket, error)
        self._failed_in_a_row = 0
        group = ticket.task.result()
        samples = flatten_samples(group)
        failure = next((s.reward_failure for s in samples if s.reward_failure is not None), None)
        if failure is not None:
            self._on_reward_failure(ticket, group, failure)
        elif any(s.status is Sample.Status.ABORTED for s in samples):
            cause = f"the generate function gave up on {describe(group)} (a sample is aborted)"
            kept = self._resumable(group, ticket.origin)
            self.waste.restarted("aborted", ticket.origin, kept, ticket.scope)
            self._requeue(ticket, kept, cause)
        else:
            self._filter(ticket, group, samples)

    def _filter(self, ticket: Ticket, group: Group, samples: list[Sample]) -> None:
        if len(group) != self.args.n_samples_per_prompt:
            wanted = f"--n-samples-per-prompt is {self.args.n_samples_per_prompt}"
            raise ValueError(f"{describe(group)}: the group has {len(group)} entries, {wanted}.")
        self.decided.append(group)
        self.counts["samples_failed"] += sum(s.status is Sample.Status.FAILED for s in samples)
        output, alike = self._verdict(samples), teaches_nothing(self.args, group)
        drops = should_drop_dynamic_filter_output(
            output, remaining_batch_size=self._remaining, target_data_size=self.target
        )
        del self._tickets[ticket.number]
        if drops:
            self._drops.on_dynamic_filter_drop(output.reason)
            self.waste.discarded("zero_variance" if alike else "filtered", group, ticket.scope)
            self.counts["filtered"] += 1
            self._settle([group], "filtered", output.reason)
            return self._report_drops(self.counts["filtered"])
        self.kept.append(group)
        self.counts["kept"] += 1
        if alike:
            self.waste.equal_rewards(group, ticket.scope)

    def _report_drops(self, dropped: int) -> None:
        """Warn each time the number has doubled; stop the run if the filter keeps nothing at all."""
        batches, rest = divmod(dropped, 10 * self.target)
        if rest == 0 and batches & (batches - 1) == 0:
            logger.warning("Rollout %d: the filter has dropped %d groups so far", self.rollout_id, dropped)
        if not self.kept and dropped >= max(MAX_DROPPED, MAX_DROPPED_BATCHES * self.target):
            name = f"--dynamic-sampling-filter-path {self.args.dynamic_sampling_filter_path}"
            raise RunStopped(
                f"{name} dropped all of {dropped} groups of rollout {self.rollout_id} "
                f"({self._drops.reasons()}): see `{as_typed('samples', 'RUN')}`."
            )

    def _verdict(self, samples: list[Sample]) -> DynamicFilterOutput:
        option, path = "--dynamic-sampling-filter-path", self.args.dynamic_sampling_filter_path
        if path is None:
            return DynamicFilterOutput(keep=True)
        with plugin_call(option, path, lambda: describe_fully(samples)):
            return call_dynamic_filter(load_function(path), self.args, samples)

    def _on_generation_failure(self, ticket: Ticket, error: BaseException) -> None:
        """Apply --group-failure-action; many failures in a row stop the run."""
        action = self.args.group_failure_action
        self._failed_in_a_row += 1
        ours = isinstance(error, GroupFailed) or is_permanent(error)
        if not ours or action == "stop" or (action == "retry" and is_permanent(error)):
            raise error
        if self._failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            raise GroupFailed(f"{self._failed_in_a_row} groups in a row failed; the last: {error}") from error
        self.waste.restarted("failed", ticket.origin, ticket.origin, ticket.scope)
        if action == "retry":
            self._requeue(ticket, ticket.origin, str(error))
        else:
            self._drop(ticket, ticket.origin, "generation", str(error))

    def _drop(self, ticket: Ticket, group: Group, reason: str, cause: str) -> None:
        logger.warning("A group is dropped: %s", cause)
        del self._tickets[ticket.number]
        self.counts["failed"] += 1
        self._settle([group], "failed", reason)

    def _on_reward_failure(self, ticket: Ticket, group: Group, failure: RewardFailure) -> None:
        action = self.args.reward_failure_action
        cause = f"the reward of {describe(group)} is {failure.kind}: {failure.reason}"
        self.counts[f"reward_{failure.kind}"] += 1
        if action == "stop":
            raise GroupFailed(f"{cause} (--reward-failure-action stop).")
        self.waste.discarded("failed", group, ticket.scope)
        if action == "drop":
            self._drop(ticket, group, f"reward_{failure.kind}", cause)
        else:
            hint = " Mend the reward, or let such groups go with --reward-failure-action drop."
            self._requeue(ticket, ticket.origin, cause, hint)

    def _requeue(self, ticket: Ticket, group: Group, cause: str, hint: str = "") -> None:
        attempts = attempt_of(first_sample(ticket.origin)) + 1
        allowed = limit(self.args, "group-attempts")
        if attempts >= allowed:
            raise GroupFailed(f"{cause}; {attempts} attempts were made (--limits group-attempts).{hint}")
        logger.warning("A group is generated again (attempt %d of %d): %s", attempts + 1, allowed, cause)
        del self._tickets[ticket.number]
        self._return_groups([next_attempt(group)])

    def _resumable(self, group: Group, origin: Group) -> Group:
        """Keep what can be continued. An aborted fan-out cannot: it starts again from its prompt."""
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

    def _return_groups(self, groups: list[Group]) -> None:
        if not groups:
            return
        try:
            self.data_source.add_samples(groups)
            self.counts["returned"] += len(groups)
        except NotImplementedError:
            logger.warning("The data source accepts no returned groups: %d groups are dropped.", len(groups))
            self.counts["failed"] += len(groups)
            self._settle(groups, "failed", "no_buffer")

    def _settle(self, groups: list[Group], outcome: Outcome, reason: str | None = None) -> None:
        if isinstance(self.data_source, DataSource):
            self.data_source.settle(groups, outcome, reason)
        followed = isinstance(getattr(self.data_source, "journal", None), CountingJournal)
        if not followed and (durable := ledger.current()) is not None:  # a source of a user's own
            durable.consumed(groups, outcome, reason)
