"""The requests of one rollout (or one evaluation), so that an abort reaches exactly those.

A scope lives in a context variable: every task that a rollout starts inherits it, evaluation has its own, and
nothing that another rollout sent can be touched through it.
"""

import asyncio
import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from slime.wire.request_names import new_scope_name, part_name

_POLL_S = 0.005
_current: ContextVar["RequestScope | None"] = ContextVar("slime_request_scope", default=None)


class RequestScope:
    """Request ids in flight. `aborted` turns true once: work that has not begun then does not begin. Adapters
    note ids from threads of their own. What its requests cost is counted: `num_sent`, `tokens` and `seconds`.

    `engines`: whom "default" means for these requests, by the name of their router. `name`: what the ids of
    its requests, and of no others, begin with.
    """

    def __init__(self, max_context_len: int | None = None, engines: str = "default") -> None:
        self.name = new_scope_name()
        self.max_context_len = max_context_len  # prompt plus response; None: only the engine's own limit
        self.engines = engines
        self.rids: set[str] = set()
        self.ended = asyncio.Event()
        self.num_sent = self.tokens = 0
        self.seconds = 0.0  # of requests, those that ran side by side added up
        self._parent: RequestScope | None = None
        self._children: weakref.WeakSet[RequestScope] = weakref.WeakSet()  # a pool has any number over time
        self._numbers = itertools.count()

    @property
    def aborted(self) -> bool:
        return self.ended.is_set()

    def abort(self) -> None:
        """Lets nothing begin from now on; called on the loop of the rollout side."""
        self.ended.set()
        for child in list(self._children):
            child.abort()

    def child(self) -> "RequestScope":
        """A part of it that can be aborted alone, and is with the whole."""
        new = RequestScope(self.max_context_len, self.engines)
        new.name, new._parent = part_name(self.name, next(self._numbers)), self
        self._children.add(new)
        if self.aborted:
            new.abort()
        return new

    @contextlib.contextmanager
    def sending(self, rid: str | None) -> Iterator[Callable[[int], None]]:
        """A request is in flight; one without an id cannot be aborted. Call what it gives with its tokens."""
        began = self.begin([rid])
        try:
            yield self.note_tokens
        finally:
            self.end(rid, began)

    def begin(self, rids: Sequence[str | None]) -> float:
        """These are in flight, until `end` is told of each and of what this returns."""
        for scope in self._with_parents():
            scope.num_sent += len(rids)
            scope.rids.update(rid for rid in rids if rid is not None)
        return _now()

    def end(self, rid: str | None, began: float) -> None:
        self.end_all([rid], began)

    def end_all(self, rids: Sequence[str | None], began: float) -> None:
        """What `begin` gave is told of each once."""
        passed = (_now() - began) * len(rids)
        for scope in self._with_parents():
            scope.seconds += passed
            scope.rids.difference_update(rids)

    def note_tokens(self, number: int) -> None:
        """Engines have made so many more."""
        for scope in self._with_parents():
            scope.tokens += number

    def _with_parents(self) -> list["RequestScope"]:
        return [self] if self._parent is None else [self, *self._parent._with_parents()]

    async def answered(self, rids: set[str], within_s: float) -> None:
        """Until none of these is in flight any more: aborted ones come back with what was made of them."""
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
    """The time by the clock of the running loop; a simulation has a clock of its own."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def current_scope() -> RequestScope | None:
    """The scope of the running task; None outside rollouts."""
    return _current.get()
