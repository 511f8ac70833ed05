"""The sandbox of daytona.io, or of a server of your own, by the vendor's package (`slime-rl[daytona]`)."""

from __future__ import annotations

import math
import shlex
from typing import Any

from slime.agent.sandbox.base import ExecResult
from slime.agent.sandbox.vendor import VendorSandbox

_MARK = "\n--errors-of-the-command--\n"  # the vendor returns one stream: it carries both, separated by this


class DaytonaSandbox(VendorSandbox):
    """A sandbox of Daytona. `image` is a container image; None: the vendor's default.

    The package reads DAYTONA_API_KEY and DAYTONA_API_URL. Commands run as the user of the image, whatever
    `user` says.
    """

    kind = "daytona"
    repeats_start = False
    _client: Any = None

    async def _start(self) -> Any:
        import daytona

        # Minutes without activity: a sandbox whose owner died stops, and is deleted when it stops.
        ends = {"auto_stop_interval": math.ceil(self.timeout / 60), "auto_delete_interval": 0}
        if self.image is None:
            wanted = daytona.CreateSandboxFromSnapshotParams(**ends)
        else:
            wanted = daytona.CreateSandboxFromImageParams(image=self.image, **ends)
        self._client = daytona.AsyncDaytona()
        try:
            box = await self._client.create(wanted)
        except BaseException:
            await self._client.close()
            raise
        self.sandbox_id = box.id
        return box

    async def __aexit__(self, *details: Any) -> None:
        try:
            await super().__aexit__(*details)
        finally:
            if self._client is not None:
                await self._client.close()

    async def _renew(self, box: Any) -> None:
        await box.refresh_activity()

    async def _end(self, box: Any) -> None:
        await self._client.delete(box)

    async def _run(self, cmd: str, user: str, env: dict[str, str] | None, timeout: float) -> ExecResult:
        # The sandbox itself ends a command that is late, so that what it printed comes back.
        script = (
            f"e=$(mktemp); timeout -k 1 {timeout:g} bash -c {shlex.quote(cmd)} 2>$e; c=$?; "
            f"printf %s {shlex.quote(_MARK)}; cat $e; rm -f $e; exit $c"
        )
        seconds = max(1, math.ceil(timeout)) + 30
        done = await self.box.process.exec(f"bash -c {shlex.quote(script)}", env=env, timeout=seconds)
        out, _, err = (done.result or "").partition(_MARK)
        return int(done.exit_code), out, err

    async def _write(self, path: str, data: bytes, user: str) -> None:
        await self.box.fs.upload_file(data, path)

    async def _read(self, path: str, user: str) -> bytes:
        from daytona import DaytonaNotFoundError

        try:
            return bytes(await self.box.fs.download_file(path) or b"")
        except DaytonaNotFoundError:
            return b""
