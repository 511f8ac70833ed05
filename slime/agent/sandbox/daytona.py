"""The box of daytona.io, or of a server of one's own, by the vendor's package (`slime[daytona]`)."""

from __future__ import annotations

import logging
import math
import shlex
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

_MARK = (
    "\n--errors-of-the-command--\n"  # the vendor returns one stream; both go through it, one after the other
)


class DaytonaSandbox:
    """`image` is a container image; None: the vendor's default. It is read with DAYTONA_API_KEY, _API_URL."""

    def __init__(
        self, image: str | None = None, *, timeout: int | None = None, rpc_retries: int | None = None
    ):
        self.image = image
        self.timeout = timeout or number_from("SLIME_AGENT_SANDBOX_LIFETIME_SEC", DEFAULT_LIFETIME_S)
        self.rpc_retries = rpc_retries or number_from("SLIME_AGENT_SANDBOX_RPC_RETRIES", DEFAULT_TRIES)
        self.sandbox_id = ""
        self._client: Any = None
        self._box: Any = None

    async def __aenter__(self) -> Self:
        try:
            import daytona  # an extra, which most runs do without
        except ImportError:
            raise SandboxUnavailable(
                "--sandbox daytona needs the package daytona: pip install 'slime[daytona]'"
            ) from None
        # Minutes: a box whose owner died stops by itself, and is deleted at once when it stops.
        ends = {"auto_stop_interval": math.ceil(self.timeout / 60), "auto_delete_interval": 0}
        if self.image is None:
            wanted = daytona.CreateSandboxFromSnapshotParams(**ends)
        else:
            wanted = daytona.CreateSandboxFromImageParams(image=self.image, **ends)
        self._client = daytona.AsyncDaytona()
        try:
            self._box = await tried(
                "daytona: start", lambda: self._client.create(wanted), tries=self.rpc_retries, repeat=False
            )
        except BaseException:
            await self._client.close()
            raise
        self.sandbox_id = self._box.id
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        box, self._box = self._box, None
        if box is None:
            return
        try:
            await tried("daytona: end", lambda: self._client.delete(box), tries=self.rpc_retries)
        except Exception as error:  # it stops by itself when its time is over
            logger.warning("daytona box %s could not be ended: %s", self.sandbox_id, error)
        await self._client.close()

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
        """As everywhere; the user is the image's, whatever `user` says."""
        box, seconds = self._started(), max(1, math.ceil(timeout))
        # The box itself ends a command that is late, so that what it printed comes back.
        script = (
            f"e=$(mktemp); timeout -k 1 {timeout:g} bash -c {shlex.quote(cmd)} 2>$e; c=$?; "
            f"printf %s {shlex.quote(_MARK)}; cat $e; rm -f $e; exit $c"
        )
        done = await tried(
            f"daytona: {cmd[:60]!r}",
            lambda: box.process.exec(f"bash -c {shlex.quote(script)}", env=env, timeout=seconds + 30),
            tries=self.rpc_retries,
            repeat=idempotent,
        )
        out, _, err = (done.result or "").partition(_MARK)
        code = int(done.exit_code)
        if code == TIME_LIMIT_CODE:
            err += f"[stopped: it ran past its limit of {timeout:g} s]"
        if check and code != 0:
            raise CommandFailed(cmd, code, out, err)
        return code, out, err

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        box, data = self._started(), content_bytes(content)
        await tried(
            f"daytona: write {sandbox_path}",
            lambda: box.fs.upload_file(data, sandbox_path),
            tries=self.rpc_retries,
        )

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        from daytona import DaytonaNotFoundError  # installed: a box was started

        box = self._started()
        try:
            data = await tried(
                f"daytona: read {sandbox_path}",
                lambda: box.fs.download_file(sandbox_path),
                tries=self.rpc_retries,
            )
        except DaytonaNotFoundError:
            return ""
        return bytes(data or b"").decode(errors="replace")

    def _started(self) -> Any:
        if self._box is None:
            raise SandboxDied("the box is not started, or ended; use `async with`")
        return self._box
