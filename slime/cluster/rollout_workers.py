"""Sends groups to rollout workers, collects what they made, and replaces workers that die."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime.arguments import Args, RunInfo
from slime.catalog.limits import limit
from slime.cluster.balanced_worker import BalancedWorker, Rotations
from slime.engines.balancer import Address, Balancer
from slime.liveness import waits
from slime.rollout.collection.collector import GroupFailed
from slime.rollout.generation.policy_requests import is_trained
from slime.rollout.generation.scope import RequestScope, current_scope
from slime.rollout.ledger import Ledger
from slime.rollout.prompt_groups import Group, describe
from slime.rollout.sample_hooks import current_rollout_id
from slime.rollout.workers.worker import Done, Job, Question, WorkerSettings
from slime.runtime.base import Future, Handle, Runtime, WorkerSpec, gather
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped, WorkerDied
from slime.utils.http_utils import is_loopback
from slime.utils.types import Sample, flatten_samples

logger = logging.getLogger(__name__)

_START_S = 600.0  # until a worker has loaded what it needs
_END_S = 10.0
_ABORT_S = 60.0


@dataclass(eq=False)
class _Worker:
    """One worker process and the jobs that it has. `handle` changes when the process is replaced."""

    name: str
    handle: Handle[BalancedWorker]
    jobs: dict[int, concurrent.futures.Future[Done]] = field(default_factory=dict)


class RolloutWorkers:
    """The workers of a run, as a `GroupRunner` for the rollout functions of this process.

    Data source, filters, buffer and ledger stay in this process. A group whose worker dies is sent to another
    worker from its original state: with the same seeds it becomes the same group.
    """

    def __init__(
        self,
        args: Args,
        info: RunInfo,
        runtime: Runtime,
        durable: Ledger | None,
        balancers: Mapping[Address, Balancer],
    ):
        self._args, self._runtime, self._ledger, self._balancers = args, runtime, durable, balancers
        called = {(info.sglang_router_ip, info.sglang_router_port), *info.sglang_model_routers.values()}
        # What listens on loopback is called from this machine alone.
        self._is_anywhere = all(not is_loopback(host or "") for host, _ in called - balancers.keys())
        self._router = f"http://{info.sglang_router_ip}:{info.sglang_router_port}"
        self._settings = WorkerSettings(
            args,
            info,
            args.rollout_workers,
            _known((self._router, *info.engine_urls)),
            changes={},
            ledger=None if durable is None else durable.for_worker(),
        )
        self._keys = itertools.count()
        self._homes: dict[str, _Worker] = {}  # by session: where an episode waits for the next rollout
        self._lock = threading.Lock()  # of the handles, their settings and `jobs`
        self._is_closed = False
        names = [f"rollout-worker-{number}" for number in range(args.rollout_workers)]
        self._workers: list[_Worker] = []
        for balancer in balancers.values():
            balancer.follow(self._rotate)
        for name in names:
            with self._lock:
                self._workers.append(_Worker(name, self._spawn(name)))
        gather([worker.handle.call(BalancedWorker.ready) for worker in self._workers], _START_S)
        self._followers = [
            threading.Thread(target=self._follow, args=(worker,), name=f"{worker.name}-news", daemon=True)
            for worker in self._workers
        ]
        for follower in self._followers:
            follower.start()
        logger.info("Groups are generated and scored by %d rollout workers.", len(names))

    def _spawn(self, name: str) -> Handle[BalancedWorker]:
        spec = WorkerSpec(name, replaceable=True, anywhere=self._is_anywhere)
        return self._runtime.spawn(spec, BalancedWorker, self._settings, self._rotations())

    # -- jobs

    async def run(self, group: Group, sampling_params: dict[str, Any], evaluation: bool) -> Group:
        durable = None if evaluation else self._ledger
        if durable is not None:  # what was finished before a crash; only a reward may be missing
            group = [durable.recall(entry) or entry for entry in group]
        scope = current_scope() or RequestScope()
        is_for_training = is_trained() and not evaluation
        job = Job(
            next(self._keys),
            group,
            sampling_params,
            evaluation,
            is_for_training,
            scope.name,
            scope.engines,
            scope.max_context_len,
            current_rollout_id(),
            None if durable is None else durable.version,
            {} if durable is None else durable.episodes_of(group),
        )
        with scope.elsewhere() as count:
            done = await self._finish(job)
        count(done.num_sent, done.tokens, done.seconds)
        if done.error is not None:
            raise done.error
        assert done.group is not None, "a job ends with a group or an error"
        return done.group

    async def _finish(self, job: Job) -> Done:
        """Return the end of a job; send it again where its worker dies."""
        allowed, durable = limit(self._args, "group-attempts"), self._ledger if job.trained else None
        for _ in range(allowed):
            worker, future = self._send(job)
            try:
                done = await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                worker.handle.call(BalancedWorker.cancel, job.key)
                raise
            except WorkerDied as death:
                last = death
                if durable is not None:
                    durable.restarted(job.group, f"{worker.name} ended")
                    job = replace(job, episodes=durable.episodes_of(job.group))
                continue
            self._remember(worker, done)
            return done
        what = f"{describe(job.group)}: {allowed} rollout workers died while they generated it"
        raise GroupFailed(f"{what} (--limits group-attempts); the last: {last}") from last

    def _send(self, job: Job) -> tuple[_Worker, concurrent.futures.Future[Done]]:
        future: concurrent.futures.Future[Done] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # so that a caller who gives up does not cancel it
        with self._lock:
            homes = [self._homes.pop(s.session_id, None) for s in flatten_samples(job.group) if s.session_id]
            worker = next(filter(None, homes), None) or min(self._workers, key=lambda one: len(one.jobs))
            worker.jobs[job.key] = future
            worker.handle.call(BalancedWorker.begin, job)
        return worker, future

    def _remember(self, worker: _Worker, done: Done) -> None:
        """Send aborted samples to the same worker again, which may hold their episodes."""
        aborted = [s for s in flatten_samples(done.group or []) if s.status is Sample.Status.ABORTED]
        with self._lock:
            self._homes.update({s.session_id: worker for s in aborted if s.session_id})

    async def abort(self, scope: str) -> None:
        await asyncio.to_thread(
            self._call_all, lambda handle: handle.call(BalancedWorker.abort, scope), _ABORT_S
        )

    def _rotations(self) -> Rotations:
        return {address: _known(balancer.urls) for address, balancer in self._balancers.items()}

    def _rotate(self) -> None:
        """Report the engines in rotation to all workers, without waiting for them."""
        with self._lock:
            for worker in self._workers:
                worker.handle.call(BalancedWorker.rotate, self._rotations())

    def know_engines(self, urls: Sequence[str]) -> None:
        engines = _known((self._router, *urls))
        self._call_all(lambda handle: handle.call(BalancedWorker.know_engines, engines), engines=engines)

    def change(self, name: str, value: object) -> None:
        """Change a setting in all workers and in later replacements."""
        changes = {**self._settings.changes, name: value}
        self._call_all(lambda handle: handle.call(BalancedWorker.change, name, value), changes=changes)

    def _call_all(
        self,
        call: Callable[[Handle[BalancedWorker]], Future[None]],
        deadline_s: float = _END_S,
        **settings: Any,
    ) -> None:
        """Call all workers; one that has ended has nothing to abort, and its successor has the settings."""
        with self._lock:
            self._settings = replace(self._settings, **settings)
            futures = [call(worker.handle) for worker in self._workers]
        for future in futures:
            try:
                future.result(deadline_s)
            except (WorkerDied, waits.WaitTimeout) as error:
                logger.info("A rollout worker did not answer: %s", error)

    # -- what workers report

    def _follow(self, worker: _Worker) -> None:
        """Pass on the news of a worker, and replace its process when it dies."""
        with waits.quietly():
            while not self._is_closed:
                try:
                    news = worker.handle.call_control(BalancedWorker.news).result()
                except WorkerDied as death:
                    if not self._is_closed:
                        self._replace(worker, death)
                    continue
                except Exception as error:
                    self._fail_jobs(worker, error)
                    return
                for one in news:
                    if isinstance(one, Done):
                        with self._lock:
                            future = worker.jobs.pop(one.key, None)
                        if future is not None:
                            future.set_result(one)
                    elif isinstance(one, Question):
                        if self._ledger is not None:
                            run(self._ledger.written())
                        worker.handle.call(BalancedWorker.is_written, one.number)
                    elif self._ledger is not None:
                        self._ledger.forward(one)

    def _replace(self, worker: _Worker, death: WorkerDied) -> None:
        logger.error(
            "%s ended while it had %d groups: another process takes its place, and these groups start again. "
            "Cause: %s",
            *(worker.name, len(worker.jobs), death),
        )
        worker.handle.kill()
        try:
            with self._lock:  # a change reaches the new process as one of its settings, or by a call
                worker.handle = self._spawn(worker.name)
                self._homes = {session: home for session, home in self._homes.items() if home is not worker}
        except Exception as error:
            self._fail_jobs(worker, RunStopped(f"{worker.name} cannot be started again: {error}"))
            raise
        self._fail_jobs(worker, death)

    def _fail_jobs(self, worker: _Worker, error: Exception) -> None:
        with self._lock:
            jobs, worker.jobs = worker.jobs, {}
        for future in jobs.values():
            future.set_exception(error)

    def close(self) -> None:
        self._is_closed = True
        self._call_all(lambda handle: handle.call(BalancedWorker.close))
        for worker in self._workers:
            worker.handle.kill()
        for follower in self._followers:  # a thread that still runs while the interpreter ends may crash it
            follower.join(_END_S)


def _known(urls: Iterable[str]) -> tuple[tuple[str, str, str | None], ...]:
    """Return address, name and token of each engine."""
    return tuple((url, waits.known_as(url), http_utils.token_of(url)) for url in urls)
