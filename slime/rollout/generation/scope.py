"""The requests of one rollout (or one evaluation), so that an abort reaches exactly those.

A scope lives in a context variable: every task that a rollout starts inherits it, evaluation has its own, and
nothing that another rollout sent can be touched through it.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_current: ContextVar["RequestScope | None"] = ContextVar("slime_request_scope", default=None)


class RequestScope:
    """Request ids in flight. `aborted` turns true once: work that has not begun then does not begin. Adapters
    note ids from threads of their own.

    `engines`: whom "default" means for these requests, by the name of their router.
    """

    def __init__(self, max_context_len: int | None = None, engines: str = "default") -> None:
        self.max_context_len = max_context_len  # prompt plus response; None: only the engine's own limit
        self.engines = engines
        self.rids: set[str] = set()
        self.ended = asyncio.Event()
        self._parent: RequestScope | None = None
        self._children: list[RequestScope] = []

    @property
    def aborted(self) -> bool:
        return self.ended.is_set()

    def abort(self) -> None:
        """From now on nothing begins; called on the loop of the rollout side."""
        self.ended.set()
        for child in self._children:
            child.abort()

    def child(self) -> "RequestScope":
        """A part of it that can be aborted alone, and is with the whole."""
        new = RequestScope(self.max_context_len, self.engines)
        new._parent = self
        self._children.append(new)
        if self.aborted:
            new.abort()
        return new

    @contextlib.contextmanager
    def sending(self, rid: str | None) -> Iterator[None]:
        """A request is in flight; one without an id cannot be aborted."""
        named = set() if rid is None else {rid}
        self.rids |= named
        try:
            with self._parent.sending(rid) if self._parent is not None else contextlib.nullcontext():
                yield
        finally:
            self.rids -= named

    @contextlib.contextmanager
    def entered(self) -> Iterator["RequestScope"]:
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


def current_scope() -> RequestScope | None:
    """The scope of the running task; None outside rollouts."""
    return _current.get()
