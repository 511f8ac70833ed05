"""What boxes of vendors share: settings from the environment, and calls that are tried again."""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from slime.agent.sandbox.base import (
    TIME_LIMIT_CODE,
    CommandFailed,
    ExecResult,
    FileContent,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
    content_bytes,
)

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


class VendorSandbox(abc.ABC):
    """A box that a vendor runs. A kind of it says how the vendor's package starts, ends and uses one."""

    workdir = "/work"
    kind: ClassVar[str]  # its --sandbox, its package and the extra of slime that installs it

    def __init__(
        self, image: str | None = None, *, timeout: int | None = None, rpc_retries: int | None = None
    ):
        self.image = image
        self.timeout = timeout or number_from("SLIME_AGENT_SANDBOX_LIFETIME_SEC", DEFAULT_LIFETIME_S)
        self.rpc_retries = rpc_retries or number_from("SLIME_AGENT_SANDBOX_RPC_RETRIES", DEFAULT_TRIES)
        self.sandbox_id = ""
        self._box: Any = None

    @abc.abstractmethod
    async def _start(self) -> Any: ...

    @abc.abstractmethod
    async def _end(self, box: Any) -> None: ...

    @abc.abstractmethod
    async def _run(
        self, cmd: str, user: str, env: dict[str, str] | None, timeout: float, idempotent: bool
    ) -> ExecResult: ...

    @abc.abstractmethod
    async def _write(self, path: str, data: bytes, user: str) -> None: ...

    @abc.abstractmethod
    async def _read(self, path: str, user: str) -> bytes:
        """The content of a file; nothing where there is none."""

    async def __aenter__(self) -> Self:
        try:
            self._box = await self._start()
        except ImportError:  # an extra, which most runs do without
            raise SandboxUnavailable(
                f"--sandbox {self.kind} needs the package {self.kind}: pip install 'slime[{self.kind}]'"
            ) from None
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        box, self._box = self._box, None
        if box is None:
            return
        try:
            await self._end(box)
        except Exception as error:  # it ends by itself when its lifetime is over
            logger.warning("%s box %s could not be ended: %s", self.kind, self.sandbox_id, error)

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        idempotent: bool = False,
    ) -> ExecResult:
        code, out, err = await self._run(cmd, user, env, timeout, idempotent)
        if code == TIME_LIMIT_CODE:
            err += f"[stopped: it ran past its limit of {timeout:g} s]"
        if check and code != 0:
            raise CommandFailed(cmd, code, out, err)
        return code, out, err

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        await self._write(sandbox_path, content_bytes(content), user)

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        return (await self._read(sandbox_path, user)).decode(errors="replace")

    @property
    def box(self) -> Any:
        """The vendor's own object."""
        if self._box is None:
            raise SandboxDied("the box is not started, or ended; use `async with`")
        return self._box

    async def _tried(self, what: str, call: Callable[[], Awaitable[_T]], *, repeat: bool = True) -> _T:
        return await tried(f"{self.kind}: {what}", call, tries=self.rpc_retries, repeat=repeat)


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
