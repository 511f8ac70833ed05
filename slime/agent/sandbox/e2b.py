"""The sandbox of e2b.dev, or of a gateway with its protocol, by the vendor's package (`slime-rl[e2b]`)."""

from __future__ import annotations

import io
import os
from typing import Any

from slime.agent.sandbox.base import TIME_LIMIT_CODE, ExecResult
from slime.agent.sandbox.vendor import VendorSandbox

_METADATA_KEY = "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY"
_FILE_S = 600


class E2BSandbox(VendorSandbox):
    """A sandbox of E2B. `image` is an E2B template.

    Behind a gateway that routes by metadata, `image` is the value of the key that
    SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY names.
    """

    kind = "e2b"

    def __init__(
        self,
        image: str | None = None,
        *,
        timeout: int | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
    ):
        super().__init__(image, timeout=timeout, rpc_retries=rpc_retries)
        self.image_metadata_key = image_metadata_key or os.environ.get(_METADATA_KEY) or None

    async def _start(self) -> Any:
        from e2b import AsyncSandbox

        wanted: dict[str, Any] = {"timeout": self.timeout}
        if self.image_metadata_key is not None:
            wanted["metadata"] = {self.image_metadata_key: self.image or ""}
        elif self.image is not None:
            wanted["template"] = self.image
        box = await AsyncSandbox.create(**wanted)
        self.sandbox_id = box.sandbox_id
        return box

    async def _renew(self, box: Any) -> None:
        await box.set_timeout(self.timeout)

    async def _end(self, box: Any) -> None:
        await box.kill()

    async def _run(self, cmd: str, user: str, env: dict[str, str] | None, timeout: float) -> ExecResult:
        from e2b import CommandExitException, TimeoutException

        try:
            done = await self.box.commands.run(cmd, user=user, envs=env or {}, timeout=timeout)
        except CommandExitException as error:
            done = error
        except TimeoutException:
            return TIME_LIMIT_CODE, "", ""
        return done.exit_code, done.stdout or "", done.stderr or ""

    async def _write(self, path: str, data: bytes, user: str) -> None:
        await self.box.files.write(path, io.BytesIO(data), user=user, request_timeout=_FILE_S)

    async def _read(self, path: str, user: str) -> bytes:
        from e2b import NotFoundException

        try:
            return bytes(await self.box.files.read(path, format="bytes", user=user, request_timeout=_FILE_S))
        except NotFoundException:
            return b""
