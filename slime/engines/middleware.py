"""Middleware of the built-in load balancer: user classes that observe, change or serve each request."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterRequest:
    """One POST, for example RouterRequest("/generate", {"text": "2+2="}, {"X-SMG-Routing-Key": "a"})."""

    path: str
    payload: dict[str, Any]
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class RouterAnswer:
    status: int
    payload: Any


Forward = Callable[[RouterRequest], Awaitable[RouterAnswer]]


class Middleware(Protocol):
    """Base class, created once as `cls(args)`. Streaming requests bypass it."""

    async def handle(self, request: RouterRequest, forward: Forward) -> RouterAnswer: ...


def chain(middlewares: Sequence[Middleware], forward: Forward) -> Forward:
    """Return one function that calls all of them, the first outermost, and finally the engine."""
    for middleware in reversed(middlewares):
        forward = functools.partial(_call, middleware, forward)
    return forward


async def _call(middleware: Middleware, inner: Forward, request: RouterRequest) -> RouterAnswer:
    try:
        return await middleware.handle(request, inner)
    except Exception as error:  # a user's code may raise anything; only the request fails
        name = type(middleware).__name__
        logger.exception("--router-middleware-paths: %s failed on %s", name, request.path)
        # A 4xx: the same request would fail again, so clients must not repeat it.
        return RouterAnswer(422, {"error": f"middleware {name}: {type(error).__name__}: {error}"})
