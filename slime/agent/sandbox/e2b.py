"""The box of e2b.dev, or of a gateway that speaks its protocol, by the vendor's package (`slime[e2b]`)."""

from __future__ import annotations

import io
import logging
import os
from types import TracebackType
from typing import Any, Self

from slime.agent.sandbox.base import (
    TIME_LIMIT_CODE,
    CommandFailed,
    ExecResult,
    FileContent,
    SandboxDied,
    SandboxUnavailable,
    content_bytes,
)
from slime.agent.sandbox.vendor import DEFAULT_LIFETIME_S, DEFAULT_TRIES, number_from, tried

logger = logging.getLogger(__name__)

_METADATA_KEY = "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY"
_FILE_S = 600


class E2BSandbox:
    """`image` is an E2B template; behind a gateway that routes by metadata, the value of the key that
    SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY names.
    """

    def __init__(
        self,
        image: str | None = None,
        *,
        timeout: int | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
    ):
        self.image = image
        self.timeout = timeout or number_from("SLIME_AGENT_SANDBOX_LIFETIME_SEC", DEFAULT_LIFETIME_S)
        self.image_metadata_key = image_metadata_key or os.environ.get(_METADATA_KEY) or None
        self.rpc_retries = rpc_retries or number_from("SLIME_AGENT_SANDBOX_RPC_RETRIES", DEFAULT_TRIES)
        self.sandbox_id = ""
        self._box: Any = None

    async def __aenter__(self) -> Self:
        try:
            from e2b import AsyncSandbox  # an extra, which most runs do without
        except ImportError:
            raise SandboxUnavailable(
                "--sandbox e2b needs the package e2b: pip install 'slime[e2b]'"
            ) from None
        wanted: dict[str, Any] = {"timeout": self.timeout}
        size = os.environ.get("SLIME_AGENT_E2B_SANDBOX_SIZE")
        if self.image_metadata_key is not None:
            wanted["metadata"] = {self.image_metadata_key: self.image or ""} | (
                {"size": size} if size else {}
            )
        elif self.image is not None:
            wanted["template"] = self.image
        self._box = await tried("e2b: start", lambda: AsyncSandbox.create(**wanted), tries=self.rpc_retries)
        self.sandbox_id = self._box.sandbox_id
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        box, self._box = self._box, None
        if box is None:
            return
        try:
            await tried("e2b: end", box.kill, tries=self.rpc_retries)
        except Exception as error:  # the vendor ends it when its lifetime is over
            logger.warning("e2b box %s could not be ended: %s", self.sandbox_id, error)

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
        from e2b import CommandExitException, TimeoutException  # installed: a box was started

        box = self._started()
        try:
            done = await tried(
                f"e2b: {cmd[:60]!r}",
                lambda: box.commands.run(cmd, user=user, envs=env or {}, timeout=timeout),
                tries=self.rpc_retries,
                repeat=idempotent,
            )
            code, out, err = done.exit_code, done.stdout or "", done.stderr or ""
        except CommandExitException as error:
            code, out, err = error.exit_code, error.stdout or "", error.stderr or ""
        except TimeoutException:
            code, out, err = TIME_LIMIT_CODE, "", f"[stopped: it ran past its limit of {timeout:g} s]"
        if check and code != 0:
            raise CommandFailed(cmd, code, out, err)
        return code, out, err

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        box, data = self._started(), content_bytes(content)
        await tried(
            f"e2b: write {sandbox_path}",
            lambda: box.files.write(sandbox_path, io.BytesIO(data), user=user, request_timeout=_FILE_S),
            tries=self.rpc_retries,
        )

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        from e2b import NotFoundException  # installed: a box was started

        box = self._started()
        try:
            data = await tried(
                f"e2b: read {sandbox_path}",
                lambda: box.files.read(sandbox_path, format="bytes", user=user, request_timeout=_FILE_S),
                tries=self.rpc_retries,
            )
        except NotFoundException:
            return ""
        return bytes(data).decode(errors="replace")

    def _started(self) -> Any:
        if self._box is None:
            raise SandboxDied("the box is not started, or ended; use `async with`")
        return self._box
