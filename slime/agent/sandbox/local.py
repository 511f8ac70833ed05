"""The local sandbox: isolated processes of this machine, of which `guest_agent.py` is the first."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import secrets
import shutil
import struct
import tempfile
import uuid
from pathlib import Path
from typing import Any, Self

from slime.agent.sandbox.base import (
    KILLED_CODE,
    TIME_LIMIT_CODE,
    CommandFailed,
    ExecResult,
    FileContent,
    Limits,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
    content_bytes,
)
from slime.agent.sandbox.isolation import (
    PLAIN,
    PrivateUser,
    best_isolation,
    has_private_users,
    isolation_command,
    report_start,
)

logger = logging.getLogger(__name__)

_START_S = 60.0
_GRACE_S = 30.0  # after a command's own deadline, on a machine that has other work
_END_S = 10.0
_FILE_S = 90.0  # for reading or writing one file
_LONGEST_HEADER = 1 << 16
_SHELL = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
_PATH = "/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_WHY = {
    "time": "it ran past its limit of {timeout:g} s",
    "memory": "the sandbox used more than its {memory} MiB of memory",
    "output": "it printed without end; only the beginning was kept",
    "files": "the sandbox had more than {limits.num_files} files",
    "sockets": "the sandbox had more than {limits.num_sockets} sockets",
    "maps": "the sandbox had more than {limits.num_maps} mappings of memory",
    "cancelled": "it was cancelled",
}


class LocalSandbox:
    """A sandbox on this machine, without a network, with its own root and /tmp.

    Example: `async with LocalSandbox() as box: code, out, err = await box.exec("python3 -c 'print(6 * 7)'")`.
    `image` is ignored (the sandbox shows the system of this machine); it exists because all kinds are created
    alike. Every command runs as the same unprivileged user, whatever `user` says.
    """

    def __init__(
        self,
        image: str | None = None,
        *,
        limits: Limits | None = None,
        isolation: str | None = None,
        read_only: tuple[str, ...] = (),
    ):
        self.image, self.limits = image, limits or Limits()
        self.sandbox_id = f"local-{uuid.uuid4().hex[:12]}"
        self._isolation, self._read_only = isolation, read_only
        self._process: asyncio.subprocess.Process | None = None
        self._user: PrivateUser | None = None
        self._folder: str | None = None
        # Ids of requests are nonces: a reply with another id was not written by the sandbox's first process.
        self._waiting: dict[str, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._cancelled: set[str] = set()
        self._reader: asyncio.Task[None] | None = None
        self._ended: str | None = None

    # -- life

    @property
    def is_open(self) -> bool:
        return self._process is not None and self._ended is None

    async def start(self) -> Self:
        """Start the sandbox; returns when it accepts commands."""
        kind = await asyncio.to_thread(best_isolation) if self._isolation is None else self._isolation
        await asyncio.to_thread(report_start, kind)
        self._user = PrivateUser() if has_private_users() else None
        uid = self._user.uid if self._user else None
        if kind == PLAIN:
            self._folder = tempfile.mkdtemp(prefix="slime-box-")
            if uid is not None:
                shutil.chown(self._folder, uid, uid)
        nonce, pipe = secrets.token_hex(16), asyncio.subprocess.PIPE
        argv, program = isolation_command(kind, self.limits, uid, nonce, self._read_only)
        hello = self._waiting[nonce] = asyncio.get_running_loop().create_future()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                cwd=self._folder or "/",
            )
            self._reader = asyncio.create_task(self._read(self._process))
            await self._send(program)
            async with asyncio.timeout(_START_S):
                await hello
            del self._waiting[nonce]
        except (OSError, TimeoutError, SandboxDied) as error:
            why = self._ended or str(error) or f"no reply within {_START_S:g} s"
            await self.close()
            raise SandboxUnavailable(f"a local sandbox ({kind}) does not start here: {why}") from None
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """End the sandbox and everything in it; returns when it is gone."""
        process, self._ended = self._process, self._ended or "the sandbox is closed"
        try:
            if process is not None:
                await _end(process)
        finally:
            if self._reader is not None:
                self._reader.cancel()
            self._fail_all(self._ended)
            if self._user is not None:
                if self._folder is not None:  # no namespace ends what is left when the agent was killed
                    uid = self._user.uid
                    become = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--")
                    killer = await asyncio.create_subprocess_exec(*become, "bash", "-c", "kill -9 -1")
                    await killer.wait()
                self._user.release()
                self._user = None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self if self.is_open else await self.start()

    async def __aexit__(self, *details: object) -> None:
        await asyncio.shield(self.close())

    # -- commands and files

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        idempotent: bool = False,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a shell command: (exit code, output, errors). Over the time limit the code is 124, over
        another limit 137, and the errors end with the reason."""
        home = self._folder or ("/root" if user == "root" else f"/home/{user}")
        given = {"PATH": _PATH, "HOME": home, "USER": user, "LANG": "C.UTF-8", "PWD": self.workdir}
        request: dict[str, Any] = {"op": "exec", "argv": [_SHELL, "-c", cmd], "env": {**given, **(env or {})}}
        request |= {"cwd": self.workdir, "timeout": timeout}
        header, blob = await self._ask(request, stdin, timeout + _GRACE_S)
        if "error" in header:
            raise SandboxError(f"{_SHELL} cannot be started: {header['error']}")
        code, reason, limits = header["code"], header["reason"], self.limits
        out = blob[: header["out"]].decode(errors="replace")
        err = blob[header["out"] :].decode(errors="replace")
        if reason is not None:
            code = TIME_LIMIT_CODE if reason == "time" else KILLED_CODE
            why = _WHY[reason].format(timeout=timeout, memory=limits.memory_bytes >> 20, limits=limits)
            err += ("\n" if err and not err.endswith("\n") else "") + f"[stopped: {why}]"
        elif header["cut"]:
            err += f"[only the first {limits.output_bytes} bytes of the output are kept]"
        if check and code != 0:
            raise CommandFailed(cmd, code, out, err)
        return code, out, err

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        request = {"op": "write", "path": self._path(sandbox_path), "timeout": _FILE_S}
        header, _ = await self._ask(request, content_bytes(content), _FILE_S + _GRACE_S)
        if "error" in header:
            raise SandboxError(f"{sandbox_path} cannot be written: {header['error']}")

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        return (await self.read_bytes(sandbox_path) or b"").decode(errors="replace")

    async def read_bytes(self, sandbox_path: str) -> bytes | None:
        """Return the content of a file; None: there is none."""
        request = {"op": "read", "path": self._path(sandbox_path), "most": self.limits.disk_bytes}
        header, blob = await self._ask({**request, "timeout": _FILE_S}, b"", _FILE_S + _GRACE_S)
        if header.get("errno") in (errno.ENOENT, errno.ENOTDIR):
            return None
        if "error" in header:
            raise SandboxError(f"{sandbox_path} cannot be read: {header['error']}")
        return blob

    async def pack(self) -> bytes:
        """Return an archive of all files of the sandbox, for `unpack`. Not of one without an own root."""
        return await self._archive("pack", b"")

    async def unpack(self, archive: bytes) -> None:
        """Replace all files by those of another sandbox. The processes of that one are not restored."""
        await self._archive("unpack", archive)

    async def _archive(self, operation: str, archive: bytes) -> bytes:
        request = {"op": operation, "most": self.limits.disk_bytes, "timeout": _FILE_S}
        header, blob = await self._ask(request, archive, _FILE_S + _GRACE_S)
        if "error" in header:
            raise SandboxError(f"the files of {self.sandbox_id}: {operation} failed: {header['error']}")
        return blob

    # -- the pipe

    @property
    def workdir(self) -> str:
        return self._folder or "/work"

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.workdir}/{path}"

    async def _ask(
        self, request: dict[str, Any], content: bytes, patience: float
    ) -> tuple[dict[str, Any], bytes]:
        if not self.is_open:
            raise SandboxDied(self._ended or "the sandbox is not started; use `async with`")
        number = secrets.token_hex(16)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        head = json.dumps({**request, "id": number}).encode()
        try:
            await self._send(struct.pack(">II", len(head), len(content)) + head + content)
            async with asyncio.timeout(patience):
                return await future
        except TimeoutError:
            await self.close()
            raise SandboxDied("the sandbox did not reply; it was ended") from None
        except asyncio.CancelledError:
            self._cancelled.add(number)
            if self.is_open and self._process is not None and self._process.stdin is not None:
                head = json.dumps({"op": "kill", "id": number}).encode()
                self._process.stdin.write(struct.pack(">II", len(head), 0) + head)
            raise
        finally:
            self._waiting.pop(number, None)

    async def _send(self, data: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None, "the sandbox is started"
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            if self._reader is not None:
                await self._reader  # it says why
            raise SandboxDied(self._ended or "the sandbox ended") from None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None and process.stderr is not None, "both are pipes"
        try:
            while True:
                header, content = await self._next_frame(process.stdout)
                number = header["id"]
                if number in self._cancelled:
                    self._cancelled.remove(number)
                    continue
                future = self._waiting[number]
                if not future.done():
                    future.set_result((header, content))
        except asyncio.CancelledError:
            if self._ended is None:  # the event loop ends before its sandboxes: release them now
                self._ended = "its event loop ended"
                _let_go(process)
            raise
        except (ValueError, KeyError, TypeError):  # also of JSON
            self._ended = "a reply came that its first process did not write; the sandbox was ended"
            logger.warning("Sandbox %s: %s.", self.sandbox_id, self._ended)
            _let_go(process)
            self._fail_all(self._ended)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            said = (await process.stderr.read(4096)).decode(errors="replace").strip()
            self._ended = self._ended or f"the sandbox ended{': ' + said[-400:] if said else ''}"
            self._fail_all(self._ended)

    async def _next_frame(self, stream: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
        head, blob = struct.unpack(">II", await stream.readexactly(8))
        if head > _LONGEST_HEADER or blob > max(self.limits.disk_bytes, 2 * self.limits.output_bytes):
            raise ValueError("no reply is that long")
        return json.loads(await stream.readexactly(head)), await stream.readexactly(blob)

    def _fail_all(self, why: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxDied(why))
                future.exception()  # marks it as retrieved: whoever waits gets it anyway
        self._waiting.clear()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the sandbox to end by closing its input; kill it if it does not."""
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    finally:  # also if the event loop ends and cancels this task: later no pipe can be closed
        _let_go(process)


def _let_go(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a process and kill it if it still runs; `Process` itself has no such method."""
    process._transport.close()  # type: ignore[attr-defined]
