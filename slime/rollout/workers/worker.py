"""The object of a rollout worker process: it generates and scores the groups that the driver sends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import queue
from dataclasses import dataclass
from typing import Any

from slime.arguments import Args, RunInfo, plugin_args
from slime.liveness import waits
from slime.observability.logging_utils import configure_logger
from slime.record.ledger_rows import AnyNote, FinishedEntry
from slime.rollout import ledger, sglang_rollout
from slime.rollout.generation import turn_gate
from slime.rollout.generation.policy_requests import not_trained
from slime.rollout.generation.scope import RequestScope
from slime.rollout.ledger import Key, Ledger
from slime.rollout.prompt_groups import Group
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils import http_utils
from slime.utils.async_utils import get_loop, run
from slime.utils.errors import portable
from slime.utils.packed_samples import pack
from slime.utils.types import flatten_samples

_POLL_S = 1.0  # how long a call for news waits
_AT_ONCE = 16  # pieces of news that travel together; a group may be megabytes


@dataclass(frozen=True, slots=True)
class Job:
    """A group to generate, with what the driver's task knows about it."""

    key: int
    group: Group
    sampling_params: dict[str, Any]
    evaluation: bool
    trained: bool  # its tokens may be trained on
    scope: str  # name of the driver's request scope
    engines: str
    max_context_len: int | None
    rollout_id: int | None
    version: int | None  # of the engines when the rollout began
    episodes: dict[Key, FinishedEntry]  # of the group, which an earlier process has started


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a job: its group or its error, and what its requests cost."""

    key: int
    group: Group | None
    error: Exception | None
    num_sent: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Question:
    """Asks the driver to report when it has written all events before this one."""

    number: int


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to know. `ledger`: the arguments of its ledger; None: the run keeps none."""

    args: Args
    info: RunInfo
    num_workers: int
    engines: tuple[tuple[str, str, str | None], ...]  # address, name and token of each
    changes: dict[str, object]  # settings that were changed during the run
    ledger: dict[str, Any] | None


class RolloutWorker:
    """Runs jobs side by side on its event loop. `news` has the control lane for itself."""

    def __init__(self, settings: WorkerSettings):
        args, count = settings.args, settings.num_workers
        configure_logger(level=args.log_level)
        self._args = plugin_args(args, settings.info)
        for name, value in settings.changes.items():
            self._args.change(name, value)
        # Each worker has its share of what all may have in flight.
        for name in ("sglang_server_concurrency", "max_tokens_in_flight"):
            if (limit := getattr(args, name)) is not None:
                self._args.change(name, math.ceil(limit / count))
        self.know_engines(settings.engines)
        self._news: queue.SimpleQueue[AnyNote | Done | Question] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._questions: dict[int, asyncio.Future[None]] = {}
        self._jobs: dict[int, tuple[asyncio.Task[None], RequestScope]] = {}
        self._ledger = None if settings.ledger is None else Ledger(self, **settings.ledger)
        ledger.use(self._ledger)

    def ready(self) -> None:
        """Load what every job needs, or raise why that is not possible."""
        sglang_rollout.GenerateState(self._args)

    def note(self, *notes: AnyNote) -> None:
        """Send events of the ledger to the driver, which has the record."""
        for note in notes:
            self._news.put(note)

    async def written(self) -> None:
        """Return when the driver has written all events until now."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._questions[number] = future
        self._news.put(Question(number))
        await future

    def is_written(self, number: int) -> None:
        future = self._questions.pop(number)
        future.get_loop().call_soon_threadsafe(future.set_result, None)

    def news(self) -> list[AnyNote | Done | Question]:
        """Return what has happened since the last call, in its order; wait a while for the first."""
        found: list[AnyNote | Done | Question] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._news.get(timeout=_POLL_S))
            while len(found) < _AT_ONCE:
                found.append(self._news.get_nowait())
        return found

    def begin(self, job: Job) -> None:
        get_loop().call_soon_threadsafe(self._begin, job)

    def _begin(self, job: Job) -> None:
        scope = RequestScope(job.max_context_len, job.engines)
        scope.name = job.scope
        with scope.entered():  # the task inherits it
            task = asyncio.ensure_future(self._run(job, scope))
        self._jobs[job.key] = task, scope
        task.add_done_callback(lambda _: self._jobs.pop(job.key))

    async def _run(self, job: Job, scope: RequestScope) -> None:
        group, error = None, None
        set_current_rollout_id(job.rollout_id)
        if self._ledger is not None and job.rollout_id is not None:
            self._ledger.begin(job.rollout_id, job.version)
            self._ledger.know_episodes(job.episodes)
        try:
            with contextlib.nullcontext() if job.trained else not_trained():
                group = await sglang_rollout.generate_and_rm_group(
                    self._args, job.group, job.sampling_params, job.evaluation
                )
            for sample in flatten_samples(group):
                pack(sample)
        except Exception as raised:
            group, error = None, portable(raised)
        self._news.put(Done(job.key, group, error, scope.num_sent, scope.tokens, scope.seconds))

    def cancel(self, key: int) -> None:
        """End a job whose result nobody wants."""
        get_loop().call_soon_threadsafe(self._cancel, key)

    def _cancel(self, key: int) -> None:
        if key in self._jobs:
            self._jobs[key][0].cancel()

    def abort(self, prefix: str) -> None:
        """Abort the requests of scopes whose names start with `prefix`; their groups return as they are."""
        run(self._abort(prefix))

    async def _abort(self, prefix: str) -> None:
        together = RequestScope()
        together.name = prefix
        for _, scope in self._jobs.values():
            if scope.name.startswith(prefix):
                scope.abort()
                together.rids |= scope.rids
        await sglang_rollout.abort_scope(self._args, together)

    def change(self, name: str, value: object) -> None:
        self._args.change(name, value)

    def know_engines(self, engines: tuple[tuple[str, str, str | None], ...]) -> None:
        for url, known_as, token in engines:
            waits.know_as(url, known_as)
            http_utils.authorize(url, token)

    def close(self) -> None:
        turn_gate.forget_all()
