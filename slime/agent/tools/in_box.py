"""Tools that run in a sandbox: python, a shell, and reading and editing of files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import zlib
from collections.abc import Iterator
from typing import Annotated, Self

from slime.agent.sandbox import Limits, LocalSandbox, Sandbox, SandboxDied, SandboxError, open_sandbox
from slime.agent.sandbox.isolation import PLAIN
from slime.agent.tools.registry import ToolError, ToolServerDied
from slime.catalog.sandboxes import SANDBOXES

logger = logging.getLogger(__name__)


class BoxTools:
    """Methods for a `ToolSet`. Files stay from call to call; processes end with their call.

    The sandbox starts with the first call and ends with the context.
    """

    def __init__(
        self,
        kind: str = "local",
        *,
        image: str | None = None,
        limits: Limits | None = None,
        timeout_s: float = 30,
    ):
        self._kind, self._image, self._limits, self._timeout_s = kind, image, limits, timeout_s
        self._stack = contextlib.AsyncExitStack()
        self._starting = asyncio.Lock()
        self._box: Sandbox | None = None
        # After a crash the sandbox is restored. Its commands have had no effect outside of it.
        row = SANDBOXES.get(kind)
        self.survives = self.repeatable = row is not None and row.is_local and row.isolation != PLAIN

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def box(self) -> Sandbox:
        """Return the sandbox of this episode, started on first use."""
        async with self._starting:
            if self._box is None:
                context = open_sandbox(self._kind, image=self._image, limits=self._limits)
                self._box = await self._stack.enter_async_context(context)
        return self._box

    async def save(self) -> bytes:
        """Return the files of the sandbox as they are now."""
        sandbox = await self.box()
        assert isinstance(sandbox, LocalSandbox), "others do not survive"
        return zlib.compress(await sandbox.pack(), 1)

    async def restore(self, state: bytes) -> None:
        sandbox = await self.box()
        assert isinstance(sandbox, LocalSandbox), "others do not survive"
        await sandbox.unpack(zlib.decompress(state))
        logger.info("Sandbox %s has the files that it had before the crash; no process.", sandbox.sandbox_id)

    async def python(self, code: Annotated[str, "a whole program; print what you want to see"]) -> str:
        """Runs a Python program and returns what it prints."""
        sandbox = await self.box()
        await sandbox.write_file(f"{sandbox.workdir}/program.py", code)
        return await self._run("python3 -I program.py")

    async def shell(self, command: Annotated[str, "for bash"]) -> str:
        """Runs a shell command in the work folder and returns what it prints."""
        return await self._run(f"{{ {command}\n}}")

    async def read_file(
        self,
        path: Annotated[str, "relative to the work folder, or absolute"],
        first_line: int = 1,
        last_line: int | None = None,
    ) -> str:
        """Lines of a file, numbered."""
        lines = (await self._text(path)).splitlines()
        if first_line < 1 or first_line > max(1, len(lines)):
            raise ToolError(f"first_line is {first_line}; {path} has {len(lines)} lines")
        chosen = lines[first_line - 1 : last_line]
        return "\n".join(f"{number} {line}" for number, line in enumerate(chosen, first_line))

    async def write_file(self, path: str, content: str) -> str:
        """Writes a whole file; one that exists is replaced."""
        sandbox = await self.box()
        with _sandbox_errors():
            await sandbox.write_file(_absolute(sandbox, path), content)
        return f"{path} has {len(content.splitlines())} lines now"

    async def edit_file(
        self,
        path: str,
        old: Annotated[str, "text that occurs exactly once in the file"],
        new: Annotated[str, "what stands there afterwards"],
    ) -> str:
        """Replaces one piece of a file."""
        text = await self._text(path)
        count = text.count(old) if old else 0
        if count != 1:
            problem = f"occurs {count} times" if count else "is not in the file"
            message = f"old {problem}; copy a piece of {path} that occurs exactly once"
            raise ToolError(f"{message}, with its indentation")
        await self.write_file(path, text.replace(old, new))
        return f"{path} is changed"

    async def _text(self, path: str) -> str:
        sandbox = await self.box()
        with _sandbox_errors():
            text = await sandbox.read_file(_absolute(sandbox, path))
        if (
            not text
            and (await self._exec(sandbox, f"test -e {shlex.quote(_absolute(sandbox, path))}"))[0] != 0
        ):
            listing = (await self._exec(sandbox, "find . -type f | head -20"))[1].split()
            raise ToolError(f"there is no file {path}; files here: {', '.join(listing) or 'none'}")
        return text

    async def _run(self, command: str) -> str:
        code, out, err = await self._exec(await self.box(), command)
        text = "\n".join(part.rstrip("\n") for part in (out, err) if part.strip())
        if code != 0:
            return f"{text}\n[exit code {code}]".lstrip("\n")
        return text or "[it printed nothing]"

    async def _exec(self, sandbox: Sandbox, command: str) -> tuple[int, str, str]:
        with _sandbox_errors():
            return await sandbox.exec(
                f"cd {shlex.quote(sandbox.workdir)} && {command}", timeout=self._timeout_s, user="agent"
            )


@contextlib.contextmanager
def _sandbox_errors() -> Iterator[None]:
    """Return errors of the sandbox to the model as tool errors; a sandbox that died ends the tools."""
    try:
        yield
    except SandboxDied as error:
        raise ToolServerDied(str(error)) from error
    except SandboxError as error:
        raise ToolError(str(error)) from error


def _absolute(box: Sandbox, path: str) -> str:
    return path if path.startswith("/") else f"{box.workdir}/{path}"
