"""The box of daytona.io, or of a server of one's own, by the vendor's package (`slime[daytona]`)."""

from __future__ import annotations

import math
import shlex
from typing import Any

from slime.agent.sandbox.base import ExecResult
from slime.agent.sandbox.vendor import VendorSandbox

_MARK = (
    "\n--errors-of-the-command--\n"  # the vendor returns one stream; both go through it, one after the other
)


class DaytonaSandbox(VendorSandbox):
    """`image` is a container image; None: the vendor's default. It is read with DAYTONA_API_KEY, _API_URL.

    The user of a command is the image's, whatever `user` says.
    """

    kind = "daytona"
    _client: Any = None

    async def _start(self) -> Any:
        import daytona

        # Minutes: a box whose owner died stops by itself, and is deleted at once when it stops.
        ends = {"auto_stop_interval": math.ceil(self.timeout / 60), "auto_delete_interval": 0}
        if self.image is None:
            wanted = daytona.CreateSandboxFromSnapshotParams(**ends)
        else:
            wanted = daytona.CreateSandboxFromImageParams(image=self.image, **ends)
        self._client = daytona.AsyncDaytona()
        try:
            box = await self._tried("start", lambda: self._client.create(wanted), repeat=False)
        except BaseException:
            await self._client.close()
            raise
        self.sandbox_id = box.id
        return box

    async def _end(self, box: Any) -> None:
        try:
            await self._tried("end", lambda: self._client.delete(box))
        finally:
            await self._client.close()

    async def _run(
        self, cmd: str, user: str, env: dict[str, str] | None, timeout: float, idempotent: bool
    ) -> ExecResult:
        run, seconds = self.box.process.exec, max(1, math.ceil(timeout))
        # The box itself ends a command that is late, so that what it printed comes back.
        script = (
            f"e=$(mktemp); timeout -k 1 {timeout:g} bash -c {shlex.quote(cmd)} 2>$e; c=$?; "
            f"printf %s {shlex.quote(_MARK)}; cat $e; rm -f $e; exit $c"
        )
        done = await self._tried(
            repr(cmd[:60]),
            lambda: run(f"bash -c {shlex.quote(script)}", env=env, timeout=seconds + 30),
            repeat=idempotent,
        )
        out, _, err = (done.result or "").partition(_MARK)
        return int(done.exit_code), out, err

    async def _write(self, path: str, data: bytes, user: str) -> None:
        upload = self.box.fs.upload_file
        await self._tried(f"write {path}", lambda: upload(data, path))

    async def _read(self, path: str, user: str) -> bytes:
        from daytona import DaytonaNotFoundError

        download = self.box.fs.download_file
        try:
            data = await self._tried(f"read {path}", lambda: download(path))
        except DaytonaNotFoundError:
            return b""
        return bytes(data or b"")
