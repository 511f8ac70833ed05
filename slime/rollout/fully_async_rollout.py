"""Fully asynchronous rollout: a pool of groups stays in flight across rollouts and during training.

    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async

A call takes the oldest finished groups out of the pool, which then fills itself again. Two rules bound the
age of a trained token (--max-weight-staleness, in weight pushes): no more groups start than the rollouts
within the bound can use, and a group that is too old nevertheless is generated again. Only the event loop
uses the data source while the pool is open.

With --deterministic-mode nothing depends on timing: groups are decided in order of issue, and a rollout ends
when all of them are finished, so that each has tokens of one version.
"""

import asyncio
import inspect
import math
from typing import Any

from slime.arguments import PluginArgs
from slime.catalog.limits import limit
from slime.liveness import waits
from slime.rollout import ledger, sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.collection.batch_collector import DISCARD_GRACE_S
from slime.rollout.collection.collector import Collector, Ticket
from slime.rollout.collection.versions import newest_version, newest_version_held, oldest_version, push_plan
from slime.rollout.data_source import take_groups
from slime.rollout.generation.scope import RequestScope
from slime.rollout.prompt_groups import (
    Group,
    attempt_of,
    copy_group,
    describe,
    first_sample,
    is_scored,
    next_attempt,
    without_response,
)
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped


class AsyncRolloutWorker:
    """The pool of groups in flight or done. It lives on the event loop.

    `open_for` starts the collection of a rollout; `close` ends it and returns its cursor.
    """

    def __init__(self, args: PluginArgs, data_source: Any):
        _check(args, data_source)
        self.args, self.data_source = args, data_source
        self.tickets: dict[int, Ticket] = {}  # in flight or done, not decided; in order of issue
        self._scope = RequestScope(args.rollout_max_context_len)  # of all that is in flight
        self.rollout_id = args.start_rollout_id - 1  # the last one that was requested
        self._plan = push_plan(args)
        self.num_kept = 0  # of the batch being collected; set by the collector
        self.version: int | None = None  # the engines' version at the start of the rollout
        self._newest: int | None = None  # the newest version seen: a push may come between two rollouts
        self.num_issued = 0  # over all rollouts
        self._collecting = self._paused = False
        self.news = asyncio.Event()  # a group is done
        self._failure: Exception | None = None  # of the data source, while nobody was collecting

    # -- admission

    @property
    def room(self) -> int:
        """Return how many groups may start now.

        A group at position p (of all that are not decided, the current batch included) is used p // batch
        rollouts from now: by then the trainer must not be further ahead than the bound.
        """
        args, size = self.args, self.args.rollout_batch_size
        first = self.rollout_id if self._collecting else self.rollout_id + 1
        last = self._plan.last_within(self.rollout_id, args.max_weight_staleness)
        last = min(last, last_rollout_id(args))  # later groups would never be used
        kept = self.num_kept if self._collecting else 0
        allowed = max(0, last - first + 1) * size - kept - len(self.tickets)
        if args.deterministic_mode:
            return allowed  # the semaphore in front of the engines limits requests
        running = sglang_rollout.GenerateState(args).semaphore.limit
        in_flight = sum(not ticket.task.done() for ticket in self.tickets.values())
        return min(allowed, math.ceil(running / args.n_samples_per_prompt) - in_flight)

    def restore_held(self) -> None:
        """Start the groups that the pool held at the checkpoint; they are not counted as issued."""
        num_held = min(getattr(self.data_source, "num_held", 0), len(getattr(self.data_source, "buffer", ())))
        if num_held:
            self.data_source.num_held = 0
            self._start(num_held)

    def fill(self) -> None:
        """Start groups until there is no room, returned ones from the buffer first."""
        if not self._paused and (room := self.room) > 0:
            self._start(room)

    def _start(self, num_groups: int) -> None:
        set_current_rollout_id(self.rollout_id)
        for group in take_groups(self.data_source, self.args, num_groups):
            number, self.num_issued = self.num_issued, self.num_issued + 1
            origin, scope = copy_group(group), self._scope.child()
            with scope.entered():  # the task inherits it, so this group can be aborted alone
                params = sglang_rollout.GenerateState(self.args).sampling_params
                task = asyncio.ensure_future(sglang_rollout.start_group(self.args, group, params))
            self.tickets[number] = Ticket(number, origin, task, scope, self._newest)
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Group]) -> None:
        self.news.set()
        if not task.cancelled() and task.exception() is None:
            self._see(newest_version(task.result()))
        if not self._collecting:  # the collector fills when it has decided
            try:
                self.fill()
            except Exception as error:
                self._failure = error  # the next rollout raises it

    def _see(self, version: int | None) -> None:
        if version is not None:
            self._newest = max(version, self._newest or 0)

    # -- consumption

    async def open_for(self, rollout_id: int) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self.rollout_id, self.num_kept, self._paused = rollout_id, 0, False
        self.version = await newest_version_held(self.args.engine_urls)
        self._see(self.version)
        self._collecting = True

    def expired(self) -> list[Ticket]:
        """Return groups in flight whose first tokens are already too old."""
        return [
            ticket
            for ticket in self.tickets.values()
            if not ticket.task.done() and self.is_stale(ticket.version)
        ]

    def is_stale(self, version: int | None) -> bool:
        """Return whether this weight version is too old for the trainer in this rollout."""
        if version is None or self.version is None:
            return False
        trained = self.version + self._plan.until(self.rollout_id, self.rollout_id)
        return trained - version > self.args.max_weight_staleness

    async def end(self, scope: RequestScope, tasks: list[asyncio.Task[Group]]) -> None:
        """Abort the requests of a scope at the engines, and cancel its tasks."""
        rids = scope.rids.copy()
        abort = asyncio.ensure_future(sglang_rollout.abort_scope(self.args, scope))
        await asyncio.wait([abort], timeout=DISCARD_GRACE_S)
        if abort.done():
            await scope.answered(rids, DISCARD_GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, abort, return_exceptions=True)

    def pause(self) -> None:
        """Start no groups until `close`: hooks may use the data source from another thread."""
        self._paused, self._collecting, self.num_kept = True, False, 0

    async def close(self) -> dict[str, Any] | None:
        """End the rollout: return the cursor with all groups of the pool, which fills itself again."""
        cursor = self._cursor()
        if (durable := ledger.current()) is not None:
            durable.cut(self.rollout_id)  # what is started from here on belongs to later rollouts
        if not self.args.deterministic_mode:  # there the next rollout fills it
            self._paused = False
            self.fill()
        if not self.tickets:
            _workers.pop(id(self.data_source), None)
        return cursor

    def held(self) -> list[Group]:
        """Return the groups of the pool, oldest first: finished ones as they are, others as fresh prompts."""
        return [_scored(ticket) or ticket.origin for ticket in self.tickets.values()]

    def _cursor(self) -> dict[str, Any] | None:
        state_dict = getattr(self.data_source, "state_dict", None)  # a user's source may keep its own state
        if state_dict is None:
            return None
        cursor: dict[str, Any] = state_dict(held=self.held()) if self.tickets else state_dict()
        return cursor

    async def stop(self) -> list[Group]:
        """End all work, and return the groups for the data source."""
        self._paused = True
        groups, scope = self.held(), self._scope
        running = [ticket.task for ticket in self.tickets.values() if not ticket.task.done()]
        self._scope = RequestScope(self.args.rollout_max_context_len)
        if running:
            await self.end(scope, running)
        self.tickets.clear()
        return groups


def _scored(ticket: Ticket) -> Group | None:
    """Return the finished group of a ticket; None: it could not be trained as it is."""
    task = ticket.task
    finished = task.done() and not task.cancelled() and task.exception() is None
    return task.result() if finished and is_scored(task.result()) else None


def last_rollout_id(args: PluginArgs) -> int:
    assert args.num_rollout is not None, "the number of rollouts is known once the dataset was read"
    return args.num_rollout - 1


def _check(args: PluginArgs, data_source: Any) -> None:
    """Refuse settings that contradict a pool that never stops."""
    state_dict = getattr(data_source, "state_dict", None)
    if state_dict is not None and "held" not in inspect.signature(state_dict).parameters:
        what = f"the state_dict of data source {type(data_source).__name__} takes no `held`"
        raise ValueError(f"{what} (groups to put first in the buffer): checkpoints would miss them.")
    for name in ("colocate", "partial_rollout"):  # a pool neither gives up the device nor aborts anything
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} contradicts --rollout-function-path ...generate_rollout_fully_async.")


class PoolCollector(Collector):
    """Collects one batch from the pool: like the default rollout, with a bound on age."""

    def __init__(self, worker: AsyncRolloutWorker, rollout_id: int):
        super().__init__(worker.args, rollout_id, worker.data_source, worker.tickets, worker.news)
        self.worker = worker

    async def collect(self) -> None:
        worker, issued_before = self.worker, self.worker.num_issued
        async with self._accounted():
            await worker.open_for(self.rollout_id)
            self.counts["pool_before"] = len(self._tickets)
            expired = worker.expired()
            await asyncio.gather(*(worker.end(ticket.scope, [ticket.task]) for ticket in expired))
            for ticket in expired:
                self._on_stale(ticket)
            while len(self.kept) < self.target:
                worker.fill()
                if not self._tickets:
                    raise RunStopped("the data source gave no groups: let get_samples continue.")
                self._decide(await self._next_done())
                worker.num_kept = len(self.kept)
            if self.rollout_id >= last_rollout_id(self.args):
                self._return_groups(await self._end_all())  # no rollout will use it
            elif self.args.deterministic_mode and self._tickets:  # so that every group has one version
                with waits.waiting(f"{len(self._tickets)} groups of the pool", owner="rollout"):
                    await asyncio.wait([ticket.task for ticket in self._tickets.values()])
            self.counts["issued"] = worker.num_issued - issued_before
            self.counts["pool_after"] = len(self._tickets)

    def _decide(self, ticket: Ticket) -> None:
        task = ticket.task
        if (
            not task.cancelled()
            and task.exception() is None
            and self.worker.is_stale(oldest_version(task.result()))
        ):
            self._on_stale(ticket)
        else:
            super()._decide(ticket)

    def _on_stale(self, ticket: Ticket) -> None:
        """Generate the group again, which counts as an attempt; drop it after too many attempts."""
        self.counts["stale"] += 1
        if (finished := _scored(ticket)) is not None:
            self.waste.discarded("stale", finished, ticket.scope)
        else:
            self.waste.restarted("stale", ticket.origin, ticket.origin, ticket.scope)
        attempts = attempt_of(first_sample(ticket.origin)) + 1
        if attempts >= limit(self.args, "group-attempts"):
            cause = f"{describe(ticket.origin)} was too old for --max-weight-staleness {attempts} times"
            self._drop(ticket, ticket.origin, "stale", cause)
        else:
            del self._tickets[ticket.number]
            self._return_groups([next_attempt(_from_prompt(ticket.origin))])

    async def _end_all(self) -> list[Group]:
        tickets = list(self.worker.tickets.values())
        groups = await self.worker.stop()
        for ticket, group in zip(tickets, groups, strict=True):
            if not is_scored(group):
                self.waste.restarted("aborted", ticket.origin, group, ticket.scope)
        return groups


def _from_prompt(origin: Group) -> Group:
    """Return the origin without responses: a finished one from the buffer would be as old again."""
    return [without_response(first_sample([entry])) for entry in origin]


_workers: dict[int, AsyncRolloutWorker] = {}  # the pool of each data source, by its id, while it is open


async def _collect(args: PluginArgs, rollout_id: int, data_source: Any) -> PoolCollector:
    worker = _workers.get(id(data_source))
    if worker is None:
        worker = _workers[id(data_source)] = AsyncRolloutWorker(args, data_source)
        worker.restore_held()
    collector = PoolCollector(worker, rollout_id)
    try:
        await collector.collect()
    except BaseException:
        _workers.pop(id(data_source), None)
        raise
    worker.pause()
    return collector


def stop_pool(data_source: Any, *, from_prompts: bool = False) -> None:
    """End the pool of this data source, if it has one, and return its groups, the finished ones as they are.

    `from_prompts`: all groups start again.
    """

    async def stop() -> None:
        worker = _workers.pop(id(data_source), None)
        if worker is not None:
            origins = [ticket.origin for ticket in worker.tickets.values()]
            groups = await worker.stop()
            data_source.add_samples(origins if from_prompts else groups)

    run(stop())


def restart_pool(data_source: Any) -> None:
    """Restart all groups of the pool and the buffer from their prompts, after a change of settings."""
    stop_pool(data_source, from_prompts=True)
    buffer = getattr(data_source, "buffer", None)
    if buffer is not None:
        buffer[:] = [_from_prompt(group) for group in buffer]


def generate_rollout_fully_async(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Make one batch from the pool (--rollout-function-path). Evaluation does not use the pool."""
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    collector = run(_collect(args, rollout_id, data_source))
    sglang_rollout.call_batch_hooks(args, collector.kept, collector.decided, data_source)
    cursor = run(collector.worker.close())
    return RolloutFnTrainOutput(samples=collector.kept, metrics=collector.metrics(), cursor=cursor)
