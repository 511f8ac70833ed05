"""Where the requests of one call of a generate function pass; closed when its rollout has ended.

A call that asks through sessions (`slime.agent.session`) need not end with its rollout: with
--partial-rollout it waits at its turnstile, tools and messages as they are, and goes on when the sample comes
up again in this process. After a restart nothing waits, and the sample begins again from its prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.generation.scope import RequestScope, current_scope
from slime.rollout.prompt_groups import Entry, copy_sample
from slime.utils.types import Sample, flatten_samples

logger = logging.getLogger(__name__)

MAX_WAITING = 512  # calls that wait for the next rollout
_POLL_S = 0.01

_current: ContextVar[Turnstile | None] = ContextVar("slime_turnstile", default=None)
_waiting: OrderedDict[str, KeptCall] = OrderedDict()


class RolloutEnded(RuntimeError):
    """A request that is not sent: the rollout it belongs to is over, and its call is not kept."""


class Turnstile:
    """Any thread may pass; `keeps`: who comes after the end of the rollout waits for the next one."""

    def __init__(self, scope: RequestScope | None = None, *, keeps: bool = False) -> None:
        self.scope = scope or RequestScope()
        self.keeps = keeps
        self.used = False  # by a session
        self.num_in_flight = 0
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def passing(self) -> RequestScope:
        """The scope to send a request in; RolloutEnded where there is none any more."""
        while True:
            with self._lock:
                if not self.scope.aborted:
                    return self.scope
                if not self.keeps:
                    raise RolloutEnded("the rollout has ended: this episode is not continued")
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, future))
            await future

    @contextlib.contextmanager
    def sending(self, rid: str | None) -> Iterator[Callable[[int], None]]:
        """A request that has passed is in flight."""
        with self._lock:
            self.num_in_flight += 1
        try:
            with self.scope.sending(rid) as made:
                yield made
        finally:
            with self._lock:
                self.num_in_flight -= 1

    def open(self, scope: RequestScope) -> None:
        """The call goes on in another rollout."""
        self._let_pass(scope, keeps=True)

    def give_up(self) -> None:
        """Nobody waits any longer."""
        self._let_pass(self.scope, keeps=False)

    def _let_pass(self, scope: RequestScope, *, keeps: bool) -> None:
        with self._lock:
            self.scope, self.keeps = scope, keeps
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # of an adapter that was stopped meanwhile
                loop.call_soon_threadsafe(_wake, future)

    @contextlib.contextmanager
    def entered(self) -> Iterator[Turnstile]:
        before = _current.get()
        _current.set(self)
        try:
            yield self
        finally:
            _current.set(before)  # no reset: a stream may be closed in another context than it was begun in


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def current_turnstile() -> Turnstile | None:
    """That of the running call; None outside of one: requests are sent in any case."""
    return _current.get()


def turnstile_for_session() -> Turnstile:
    """That of the running call, which can wait by this; outside of one it follows the scope of the task."""
    turnstile = _current.get() or Turnstile(current_scope())
    turnstile.used = True
    return turnstile


class KeptCall:
    """A call of a generate function in a task of its own, which may outlast the rollout."""

    def __init__(self, turnstile: Turnstile, call: Coroutine[Any, Any, Entry]) -> None:
        self.turnstile = turnstile
        self.waited = False  # for another rollout
        with turnstile.entered():
            self.task: asyncio.Task[Entry] = asyncio.ensure_future(call)

    async def result(self) -> Entry | None:
        """What it returned; None: the rollout ended first, and the call can wait."""
        ended = asyncio.ensure_future(self.turnstile.scope.ended.wait())
        try:
            await asyncio.wait({self.task, ended}, return_when=asyncio.FIRST_COMPLETED)
            # Engines have answered what was aborted, before weights change or they are put aside.
            while self.turnstile.used and self.turnstile.num_in_flight and not self.task.done():
                await asyncio.wait({self.task}, timeout=_POLL_S)
            if self.turnstile.used and not self.task.done():
                return None
            return await self.task
        except asyncio.CancelledError:
            self.give_up()
            await asyncio.gather(self.task, return_exceptions=True)
            raise
        finally:
            ended.cancel()

    def give_up(self) -> None:
        """End it; any thread may."""
        self.turnstile.give_up()
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)


def can_be_kept(args: PluginArgs) -> bool:
    """Whether a call may go on in the next rollout: its first tokens are then of an older policy."""
    return bool(
        args.partial_rollout
        and args.partial_episodes == "continue"
        and not args.mask_offpolicy_in_partial_rollout
        and not args.deterministic_mode
    )


async def call_or_wait(sample: Sample, call: Coroutine[Any, Any, Entry]) -> Entry:
    """The result of `call`, or of the call that waits for this sample since an earlier rollout.

    A call that has to wait again gives the sample back as it was, aborted: the next rollout finds it by its
    session's id.
    """
    scope = current_scope() or RequestScope()
    kept = _waiting.pop(sample.session_id, None) if sample.session_id else None
    if kept is not None:
        call.close()
        kept.turnstile.open(scope)
    else:
        kept = KeptCall(Turnstile(scope, keeps=True), call)
    origin = copy_sample(sample)
    made = await kept.result()
    if made is not None:
        for one in flatten_samples([made]) if kept.waited else ():
            # It may have begun as a spare of its group, under another index.
            one.index = sample.index
            one.rollout_id = one.rollout_id if one.rollout_id is None else sample.rollout_id or sample.index
        return made
    origin.status = Sample.Status.ABORTED
    origin.session_id = sample.session_id
    assert origin.session_id is not None, "samples of a rollout have a session"
    _waiting[origin.session_id], kept.waited = kept, True
    while len(_waiting) > MAX_WAITING:
        oldest = _waiting.popitem(last=False)[1]
        oldest.give_up()
        await asyncio.wait({oldest.task})  # its session ends before another of its name begins
        logger.warning("more than %d episodes wait for the next rollout: one begins again", MAX_WAITING)
    return origin


def forget_all() -> None:
    """Called at the end of a run: nothing waits any longer."""
    while _waiting:
        _waiting.popitem()[1].give_up()
