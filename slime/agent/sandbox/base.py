"""The interface of a sandbox, where commands of a model run: its limits, its errors, its methods.

Every kind (`slime/catalog/sandboxes.py`) has these methods. A command that fails, also by a limit, is a
result with an exit code, as in a shell; an exception means that the sandbox itself cannot be used.
"""

from __future__ import annotations

import asyncio
import shlex
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

ExecResult = tuple[int, str, str]  # exit code, standard output, standard error
FileContent = str | bytes | Path  # text, bytes, or a file of this machine that is copied in

TIME_LIMIT_CODE = 124  # as `timeout` gives
KILLED_CODE = 137  # as a shell gives for SIGKILL: memory, output, number of files
MIB = 1 << 20


class SandboxError(RuntimeError):
    """The sandbox cannot perform an operation; the message has the reason."""


class SandboxUnavailable(SandboxError):
    """No sandbox of this kind can be started here: a program, a package or a key is missing."""


class SandboxDied(SandboxError):
    """The sandbox ended while something ran in it; another one may work."""


class CommandFailed(SandboxError):
    """A command that had to succeed (`check=True`) did not."""

    def __init__(self, cmd: str, code: int, out: str, err: str):
        super().__init__(f"exit code {code} of {cmd[:120]!r}: {(err or out)[-400:].strip()}")
        self.code, self.out, self.err = code, out, err


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a local sandbox. A command over a limit is ended; the sandbox stays usable.

    Memory counts all processes of the sandbox together, with their page tables and sockets. Files are kept
    in memory too, up to `disk_bytes`: a sandbox costs the machine at most the sum of both.
    """

    memory_bytes: int = 512 * MIB
    disk_bytes: int = 128 * MIB  # all files of the sandbox together
    file_bytes: int = 64 * MIB  # one file
    num_files: int = 20_000
    num_processes: int = 64
    open_files: int = 256
    num_sockets: int = 2_000  # all processes together; not counted without protection
    # Mappings of memory, all processes together. One that hides its own counts as 65,530: there is room for
    # three, such as the grader of --rm-type code and the worker that it has just forked.
    num_maps: int = 200_000
    cpu_s: int = 120  # of one process
    output_bytes: int = MIB  # kept of each stream of a command; sixteen times as much ends it


@runtime_checkable
class Sandbox(Protocol):
    """An async context: entering starts the sandbox, leaving ends it with everything in it."""

    sandbox_id: str

    @property
    def workdir(self) -> str:
        """The folder in which commands start."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *details: object) -> None: ...

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
        """Run a shell command. `check`: a code other than 0 raises CommandFailed. `idempotent`: it may be
        run a second time when the connection to the sandbox broke; this is the one way to retry a command."""
        ...

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None: ...

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Return the text of a file; "" where there is none."""
        ...


def content_bytes(content: FileContent) -> bytes:
    if isinstance(content, Path):
        return content.read_bytes()
    return content.encode() if isinstance(content, str) else content


async def exec_and_wait(
    sb: Sandbox,
    cmd: str,
    time_budget_sec: float,
    tag: str = "job",
    *,
    user: str = "root",
    env: dict[str, str] | None = None,
    poll_sec: float = 5.0,
) -> int:
    """Run a long command that survives a broken connection; returns its exit code, or -1 when out of time.

    Its output is in /tmp/TAG-*.log of the sandbox. A command out of time is killed with all it started.
    """
    base = f"/tmp/{tag}-{uuid.uuid4().hex[:8]}"
    script = f"(\n{cmd}\n)\necho $? > {base}.tmp && mv {base}.tmp {base}.exit\n"
    await sb.write_file(f"{base}.sh", script, user=user)
    start = f"setsid bash {base}.sh > {base}.log 2>&1 < /dev/null & echo $! > {base}.pid"
    await sb.exec(start, user=user, env=env, check=True)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + time_budget_sec
    while True:
        code = (await sb.read_file(f"{base}.exit", user=user)).strip()
        if code:
            return int(code)
        left = deadline - loop.time()
        if left <= 0:
            kill = f"kill -9 -$(cat {base}.pid) 2>/dev/null; true"
            await sb.exec(kill, user=user, idempotent=True)
            return -1
        await asyncio.sleep(min(poll_sec, left))


async def ensure_agent_user(sb: Sandbox, workdir: str) -> None:
    """Create a user `agent` that owns the work folder and may use git in it, whoever made the files."""
    folder = shlex.quote(workdir)
    await sb.exec(
        "{ id agent >/dev/null 2>&1 || useradd -m -s /bin/bash agent; } && "
        f"mkdir -p /home/agent {folder} && chown -R agent:agent /home/agent {folder} && "
        "{ ! command -v git >/dev/null || git config --system --replace-all safe.directory '*'; }",
        user="root",
        check=True,
        timeout=60,
        idempotent=True,
    )
