"""Tracks the requests of one rollout or evaluation, so that an abort reaches exactly these.

A scope lives in a context variable: every task that a rollout starts inherits it, and evaluation has its own.
"""

import asyncio
import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_POLL_S = 0.005
_ELSEWHERE = "@worker"  # ends the names of work that other processes do for a scope
_current: ContextVar["RequestScope | None"] = ContextVar("slime_request_scope", default=None)


class RequestScope:
    """Request ids in flight, and the cost of all requests: `num_sent`, `tokens` and `seconds`.

    After `abort` no new work starts. Adapters register ids from their own threads. `engines`: the router for
    requests to "default". `name`: unique prefix of the ids of its requests; the first part has a fixed width,
    each nested scope adds a number, and every part ends with a dot.
    """

    def __init__(self, max_context_len: int | None = None, engines: str = "default") -> None:
        self.name = f"{os.urandom(8).hex()}."
        self.max_context_len = max_context_len  # prompt plus response; None: only the engine's limit
        self.engines = engines
        self.rids: set[str] = set()
        self.ended = asyncio.Event()
        self.num_sent = self.tokens = 0
        self.seconds = 0.0  # summed over requests, also over concurrent ones
        self._parent: RequestScope | None = None
        self._children: weakref.WeakSet[RequestScope] = weakref.WeakSet()  # a pool makes any number over time
        self._numbers = itertools.count()

    @property
    def aborted(self) -> bool:
        return self.ended.is_set()

    def abort(self) -> None:
        """Prevent all new work. Call this on the event loop of the rollout."""
        self.ended.set()
        for child in list(self._children):
            child.abort()

    def child(self) -> "RequestScope":
        """Return a part of this scope that can be aborted alone, and is aborted with the whole."""
        new = RequestScope(self.max_context_len, self.engines)
        new.name, new._parent = f"{self.name}{next(self._numbers)}.", self
        self._children.add(new)
        if self.aborted:
            new.abort()
        return new

    @contextlib.contextmanager
    def sending(self, rid: str | None) -> Iterator[Callable[[int], None]]:
        """Register a request while it is in flight; call what this yields with its number of tokens.

        A request without an id cannot be aborted.
        """
        scopes, started = self._with_parents(), _now()
        for scope in scopes:
            scope.num_sent += 1
            if rid is not None:
                scope.rids.add(rid)
        try:
            yield self.note_tokens
        finally:
            for scope in scopes:
                scope.seconds += _now() - started
                scope.rids.discard(rid or "")

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[Callable[[int, int, float], None]]:
        """Register work of another process; call what this yields with its requests, tokens and seconds."""
        scopes, name = self._with_parents(), f"{self.name}{next(self._numbers)}{_ELSEWHERE}"
        for scope in scopes:
            scope.rids.add(name)

        def count(num_sent: int, tokens: int, seconds: float) -> None:
            for scope in scopes:
                scope.num_sent += num_sent
                scope.tokens += tokens
                scope.seconds += seconds

        try:
            yield count
        finally:
            for scope in scopes:
                scope.rids.discard(name)

    @property
    def own_rids(self) -> list[str]:
        """Return the ids of requests that this process has sent; threads of adapters change them."""
        return sorted(rid for rid in self.rids.copy() if not rid.endswith(_ELSEWHERE))

    def note_tokens(self, number: int) -> None:
        """Add to the number of tokens that engines have generated."""
        for scope in self._with_parents():
            scope.tokens += number

    def _with_parents(self) -> list["RequestScope"]:
        return [self] if self._parent is None else [self, *self._parent._with_parents()]

    async def answered(self, rids: set[str], within_s: float) -> None:
        """Wait until none of these is in flight; aborted requests return with what was generated so far."""
        late = _now() + within_s
        while self.rids & rids and _now() < late:
            await asyncio.sleep(_POLL_S)

    @contextlib.contextmanager
    def entered(self) -> Iterator["RequestScope"]:
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


def _now() -> float:
    return asyncio.get_running_loop().time()  # a simulation has a clock of its own


def current_scope() -> RequestScope | None:
    """Return the scope of the running task; None outside rollouts."""
    return _current.get()
