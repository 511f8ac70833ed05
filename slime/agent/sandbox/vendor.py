"""Shared code of hosted sandboxes: settings from environment variables, and retries of API calls."""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Self, TypeVar

from slime.agent.sandbox.base import (
    TIME_LIMIT_CODE,
    CommandFailed,
    ExecResult,
    FileContent,
    SandboxDied,
    SandboxUnavailable,
    content_bytes,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
_RENEWALS = 4  # of a lease, in its time
# Parts of the names of exceptions in HTTP libraries which mean that the call may not have arrived.
_TRANSIENT = re.compile(
    "Protocol|Connect|Read|Write|Pool|SSL|Disconnected|RateLimit|Unavailable|Unreachable|Busy"
)


class VendorSandbox(abc.ABC):
    """A sandbox that a vendor runs. Subclasses call the vendor's package; retries are done here."""

    workdir = "/work"
    kind: ClassVar[str]  # its --sandbox, its package and the extra of slime that installs it
    repeats_start: ClassVar[bool] = True  # False: a start whose outcome is unknown is not sent again

    def __init__(
        self, image: str | None = None, *, timeout: int | None = None, rpc_retries: int | None = None
    ):
        self.image = image
        # A lease, which is renewed as long as this process lives: an episode may take longer.
        self.timeout = timeout or int(os.environ.get("SLIME_AGENT_SANDBOX_LIFETIME_SEC") or 900)
        self.rpc_retries = rpc_retries or int(os.environ.get("SLIME_AGENT_SANDBOX_RPC_RETRIES") or 6)
        self.sandbox_id = ""
        self._box: Any = None
        self._renewing: asyncio.Task[None] | None = None

    @abc.abstractmethod
    async def _start(self) -> Any:
        """Create a sandbox, set `sandbox_id` and return the vendor's object."""

    @abc.abstractmethod
    async def _renew(self, box: Any) -> None:
        """Let the sandbox live for `timeout` seconds from now."""

    @abc.abstractmethod
    async def _end(self, box: Any) -> None: ...

    @abc.abstractmethod
    async def _run(self, cmd: str, user: str, env: dict[str, str] | None, timeout: float) -> ExecResult: ...

    @abc.abstractmethod
    async def _write(self, path: str, data: bytes, user: str) -> None: ...

    @abc.abstractmethod
    async def _read(self, path: str, user: str) -> bytes:
        """Return the content of a file; empty where there is none."""

    async def __aenter__(self) -> Self:
        try:
            self._box = await self._retry("start", self._start, repeat=self.repeats_start)
        except ImportError:  # an extra, which most runs do without
            raise SandboxUnavailable(
                f"--sandbox {self.kind} needs the package {self.kind}: pip install 'slime-rl[{self.kind}]'"
            ) from None
        self._renewing = asyncio.create_task(self._renew_until_closed(self._box))
        return self

    async def _renew_until_closed(self, box: Any) -> None:
        while True:
            await asyncio.sleep(self.timeout / _RENEWALS)
            try:
                await self._renew(box)
            except Exception as error:  # the next renewal is early enough
                message = "The lease of %s sandbox %s was not renewed (%s); the next try is in %g s."
                logger.warning(message, self.kind, self.sandbox_id, error, self.timeout / _RENEWALS)

    async def __aexit__(self, *details: object) -> None:
        box, self._box = self._box, None
        if box is None:
            return
        if self._renewing is not None:
            self._renewing.cancel()
        try:
            await self._retry("end", lambda: self._end(box))
        except Exception as error:
            message = "%s sandbox %s could not be ended (%s); it ends when its lease is over."
            logger.warning(message, self.kind, self.sandbox_id, error)

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
        code, out, err = await self._retry(
            repr(cmd[:60]), lambda: self._run(cmd, user, env, timeout), repeat=idempotent
        )
        if code == TIME_LIMIT_CODE:
            err += f"[stopped: it ran past its limit of {timeout:g} s]"
        if check and code != 0:
            raise CommandFailed(cmd, code, out, err)
        return code, out, err

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        data = content_bytes(content)
        await self._retry(f"write {sandbox_path}", lambda: self._write(sandbox_path, data, user))

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        data = await self._retry(f"read {sandbox_path}", lambda: self._read(sandbox_path, user))
        return data.decode(errors="replace")

    @property
    def box(self) -> Any:
        """The vendor's own object."""
        if self._box is None:
            raise SandboxDied("the sandbox is not started, or has ended; use `async with`")
        return self._box

    async def _retry(self, what: str, call: Callable[[], Awaitable[_T]], *, repeat: bool = True) -> _T:
        """Call the vendor up to `rpc_retries` times. `repeat` False: not again if the outcome is unknown."""
        tries, number = self.rpc_retries, 0
        while True:
            number += 1
            try:
                return await call()
            except Exception as error:
                if not is_transient(error):
                    raise
                text = f"{self.kind}: {what}: {type(error).__name__}: {error} (try {number} of {tries})"
                if not repeat or number >= tries:
                    raise SandboxDied(text) from error
                logger.info("Sandbox call failed and is retried: %s", text)
            wait = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (number - 1))
            await asyncio.sleep(wait * random.uniform(0.8, 1.2))


def is_transient(error: BaseException) -> bool:
    """Return whether a call failed on its way, so that another try can help."""
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    name = type(error).__name__
    return name.endswith(("Error", "Timeout", "Exception")) and bool(_TRANSIENT.search(name))
