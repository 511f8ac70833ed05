"""What boxes of vendors share: settings from the environment, and calls that are tried again."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from slime.agent.sandbox.base import SandboxDied, SandboxError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
DEFAULT_LIFETIME_S = 3600
DEFAULT_TRIES = 6
# Words in the names of exceptions of HTTP libraries that say: the call may not have arrived.
_BROKEN = (
    "Protocol",
    "Connect",
    "Read",
    "Write",
    "Pool",
    "SSL",
    "Disconnected",
    "RateLimit",
    "Unavailable",
    "Unreachable",
    "Busy",
)


def number_from(variable: str, default: int) -> int:
    """A whole number of the environment."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable} is {text!r}; it must be a whole number") from None


def may_work_later(error: BaseException) -> bool:
    """Whether a call failed on its way, so that another try can help."""
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    return type(error).__name__.endswith(("Error", "Timeout", "Exception")) and any(
        word in type(error).__name__ for word in _BROKEN
    )


async def tried(
    what: str,
    call: Callable[[], Awaitable[_T]],
    *,
    tries: int,
    repeat: bool = True,
    first_wait_s: float | None = None,
) -> _T:
    """The answer of a vendor, after up to `tries` tries. `repeat`: the call may arrive twice without harm;
    without it one whose fate is unknown is not sent again."""
    wait = _FIRST_WAIT_S if first_wait_s is None else first_wait_s
    for number in range(1, tries + 1):
        try:
            return await call()
        except Exception as error:
            if not may_work_later(error):
                raise
            if not repeat or number == tries:
                raise SandboxDied(
                    f"{what}: {type(error).__name__}: {error} (try {number} of {tries})"
                ) from error
            logger.info("sandbox: %s failed, trying again: %s: %s", what, type(error).__name__, error)
        await asyncio.sleep(min(_LONGEST_WAIT_S, wait * 2 ** (number - 1)) * random.uniform(0.8, 1.2))
    raise SandboxError(f"{what} was tried {tries} times")
