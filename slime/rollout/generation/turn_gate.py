"""Holds back requests of a generate call once its rollout has ended.

With --partial-rollout a call that generates through sessions (`slime.agent.session`) waits at its gate and
resumes when a later rollout of this process issues the sample again.
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
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_WAITING = 512  # calls that wait for the next rollout
_POLL_S = 0.01

_current: ContextVar[TurnGate | None] = ContextVar("slime_turn_gate", default=None)
_waiting: OrderedDict[str, KeptCall] = OrderedDict()


class RolloutEnded(RuntimeError):
    """Raised instead of sending a request: its rollout is over, and its call is not kept."""


class TurnGate:
    """A gate that every request of a call passes. `keeps`: late requests wait for the next rollout."""

    def __init__(self, scope: RequestScope | None = None, *, keeps: bool = False) -> None:
        self.scope = scope or RequestScope()
        self.keeps = keeps
        self.used = False  # by a session
        self.num_in_flight = 0
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def passing(self) -> RequestScope:
        """Return the scope to send a request in; raise RolloutEnded if the rollout is over for this call."""
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
        """Count a request that has passed as in flight."""
        with self._lock:
            self.num_in_flight += 1
        try:
            with self.scope.sending(rid) as made:
                yield made
        finally:
            with self._lock:
                self.num_in_flight -= 1

    def open(self, scope: RequestScope, *, keeps: bool = True) -> None:
        """Resume the call in another rollout; without `keeps` all waiting requests fail."""
        with self._lock:
            self.scope, self.keeps = scope, keeps
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # the loop of an adapter that was stopped meanwhile
                loop.call_soon_threadsafe(_wake, future)

    @contextlib.contextmanager
    def entered(self) -> Iterator[TurnGate]:
        before = _current.get()
        _current.set(self)
        try:
            yield self
        finally:
            _current.set(before)  # no reset: a stream may be closed in another context than it started in


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def current_gate() -> TurnGate | None:
    """Return the gate of the running generate call; None outside of one, where requests always pass."""
    return _current.get()


def gate_for_session() -> TurnGate:
    """Return the gate of the running generate call, or one bound to the current task's scope."""
    gate = _current.get() or TurnGate(current_scope())
    gate.used = True
    return gate


class KeptCall:
    """A call of a generate function in its own task, which may outlive the rollout."""

    def __init__(self, gate: TurnGate, call: Coroutine[Any, Any, Entry]) -> None:
        self.gate = gate
        with gate.entered():
            self.task: asyncio.Task[Entry] = asyncio.ensure_future(call)

    async def result(self) -> Entry | None:
        """Return the result of the call; None: the rollout ended first, and the call waits."""
        ended = asyncio.ensure_future(self.gate.scope.ended.wait())
        try:
            await asyncio.wait({self.task, ended}, return_when=asyncio.FIRST_COMPLETED)
            # Engines must have returned aborted requests before weights change or engines are offloaded.
            while self.gate.used and self.gate.num_in_flight and not self.task.done():
                await asyncio.wait({self.task}, timeout=_POLL_S)
            if self.gate.used and not self.task.done():
                return None
            return await self.task
        except asyncio.CancelledError:
            self.give_up()
            await asyncio.gather(self.task, return_exceptions=True)
            raise
        finally:
            ended.cancel()

    def give_up(self) -> None:
        """End the call. Any thread may do this."""
        self.gate.open(self.gate.scope, keeps=False)
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)


def can_be_kept(args: PluginArgs) -> bool:
    """Return whether a call may resume in the next rollout; its first tokens are then of an older policy."""
    return bool(
        args.partial_rollout
        and args.partial_episodes == "continue"
        and not args.mask_offpolicy_in_partial_rollout
        and not args.deterministic_mode
    )


async def call_or_wait(sample: Sample, call: Coroutine[Any, Any, Entry]) -> Entry:
    """Return the result of `call`, or of the call that has waited for this sample since an earlier rollout.

    If the call must wait again, the sample is returned unchanged and aborted. The next rollout finds the call
    by the sample's session id.
    """
    scope = current_scope() or RequestScope()
    kept = _waiting.pop(sample.session_id, None) if sample.session_id else None
    if kept is not None:
        call.close()
        kept.gate.open(scope)
    else:
        kept = KeptCall(TurnGate(scope, keeps=True), call)
    origin = copy_sample(sample)
    made = await kept.result()
    if made is not None:
        return made
    origin.status = Sample.Status.ABORTED
    origin.session_id = sample.session_id
    assert origin.session_id is not None, "samples of a rollout have a session"
    _waiting[origin.session_id] = kept
    while len(_waiting) > MAX_WAITING:
        oldest = _waiting.popitem(last=False)[1]
        oldest.give_up()
        await asyncio.wait({oldest.task})  # its session must end before another of that name starts
        logger.warning("%d episodes wait for the next rollout: the oldest starts again.", MAX_WAITING)
    return origin


def forget_all() -> None:
    """End all waiting calls, at the end of a run."""
    while _waiting:
        _waiting.popitem()[1].give_up()
