"""What a sandbox is: a place where commands of a model run, with limits and typed ways to fail.

Every kind (`slime/catalog/sandboxes.py`) has these methods. A command that fails, also by a limit, is a
result with an exit code, as in a shell; an exception means that the box itself cannot be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

ExecResult = tuple[int, str, str]  # exit code, standard output, standard error
FileContent = str | bytes | Path  # text, bytes, or a file of this machine that is copied in

TIME_LIMIT_CODE = 124  # as `timeout` gives
KILLED_CODE = 137  # as a shell gives for SIGKILL: memory, output, number of files
MIB = 1 << 20


class SandboxError(RuntimeError):
    """The box cannot do what was asked; the message says why."""


class SandboxUnavailable(SandboxError):
    """No box of this kind can be started here: a program, a package or a key is missing."""


class SandboxDied(SandboxError):
    """The box ended while something was under way in it; another one may work."""


class CommandFailed(SandboxError):
    """A command that had to succeed (`check=True`) did not."""

    def __init__(self, cmd: str, code: int, out: str, err: str):
        super().__init__(f"exit code {code} of {cmd[:120]!r}: {(err or out)[-400:].strip()}")
        self.code, self.out, self.err = code, out, err


@dataclass(frozen=True, slots=True)
class Limits:
    """What a local box may use. One command over a limit ends; the box stays usable.

    Memory counts all processes of the sandbox together, with their page tables and sockets. Files are kept
    in memory too, up to `disk_bytes`: a sandbox costs the machine at most the sum of both.
    """

    memory_bytes: int = 512 * MIB
    disk_bytes: int = 128 * MIB  # all files of the box together
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

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"the limit {name} of a sandbox is {getattr(self, name)}; it must be at least 1"
                )


@runtime_checkable
class Sandbox(Protocol):
    """An async context: entering starts the box, leaving ends it with everything in it."""

    sandbox_id: str

    @property
    def workdir(self) -> str:
        """The folder in which commands start, where their files are."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

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
        run a second time when the connection to the box broke while it ran."""
        ...

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None: ...

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """The text of a file; "" where there is none."""
        ...


def content_bytes(content: FileContent) -> bytes:
    if isinstance(content, Path):
        return content.read_bytes()
    return content.encode() if isinstance(content, str) else content
