"""MCP servers as tool sets: a program that speaks on standard streams, or an address (`slime-rl[mcp]`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from slime.agent.tools.registry import Tool, ToolError, ToolServerDied

_START_S = 60.0
_CALL_S = 120.0


class McpServer:
    """One server, which runs while the context lasts; when it dies, calls raise ToolServerDied."""

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = _START_S,
        call_timeout_s: float = _CALL_S,
    ):
        """`server`: an address (http://...), or a command with its arguments."""
        self._server, self._env = server, dict(env or {})
        self._start_timeout_s, self._call_timeout_s = start_timeout_s, call_timeout_s
        self.tools: list[Tool] = []
        self._session: Any = None
        self._ready: asyncio.Future[None] | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._errors: Any = None  # the standard error of a program

    @property
    def name(self) -> str:
        return self._server if isinstance(self._server, str) else " ".join(self._server)

    async def __aenter__(self) -> Self:
        try:
            import mcp  # noqa: F401 - an extra, which most runs do without
        except ImportError:
            raise ImportError(
                "tools of an MCP server need the package mcp: pip install 'slime-rl[mcp]'"
            ) from None
        self._ready = asyncio.get_running_loop().create_future()
        # The package needs its contexts entered and left by one task; calls may come from any.
        self._task = asyncio.create_task(self._hold())
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await asyncio.shield(self._ready)
        except BaseException as error:
            await self.__aexit__()
            if not isinstance(error, TimeoutError):
                raise
            message = f"{self.name} did not start within {self._start_timeout_s:g} s"
            raise ToolServerDied(message) from None
        return self

    async def __aexit__(self, *details: object) -> None:
        self._stop.set()
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=self._start_timeout_s)
            if not done:
                self._task.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await self._task

    async def _hold(self) -> None:
        from mcp import ClientSession

        assert self._ready is not None, "set before the task starts"
        try:
            async with contextlib.AsyncExitStack() as stack:
                streams = await stack.enter_async_context(self._transport(stack))
                session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
                await session.initialize()
                self.tools = await self._listed(session)
                self._session = session
                self._ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            cause = _innermost(error)
            if not self._ready.done():
                last_words = self._last_words()
                text = f"{self.name} does not answer as an MCP server: {cause}{last_words}"
                self._ready.set_exception(ToolServerDied(text))
        finally:
            self._session = None

    def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        if isinstance(self._server, str):
            from mcp.client.streamable_http import streamable_http_client

            return streamable_http_client(self._server)
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        # Left with the stack, after the server has ended.
        self._errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        path = {"PATH": os.environ.get("PATH", "")}
        command = StdioServerParameters(
            command=self._server[0], args=list(self._server[1:]), env={**path, **self._env}
        )
        return stdio_client(command, errlog=self._errors)

    def _last_words(self) -> str:
        if self._errors is None or self._errors.closed:
            return ""
        self._errors.seek(0)
        return f"; it said: {self._errors.read()[-400:].strip()}"

    async def _listed(self, session: Any) -> list[Tool]:
        from mcp.types import PaginatedRequestParams

        tools: list[Tool] = []
        cursor = None
        while True:
            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
            tools += map(self._as_tool, page.tools)
            cursor = page.next_cursor
            if not cursor:
                return tools

    def _as_tool(self, one: Any) -> Tool:
        call: Any = partial(self._call, one.name)
        hints = one.annotations
        call.repeatable = bool(hints and (hints.read_only_hint or hints.idempotent_hint))
        call.survives = isinstance(self._server, str) or bool(hints and hints.read_only_hint)
        return Tool(one.name, one.description or "", one.input_schema, call)

    async def _call(self, tool: str, /, **arguments: Any) -> str:
        if self._session is None:
            raise ToolServerDied(f"{self.name} has ended")
        try:
            async with asyncio.timeout(self._call_timeout_s):
                result = await self._session.call_tool(tool, arguments)
        except TimeoutError:
            raise ToolError(f"{tool} did not respond within {self._call_timeout_s:g} s") from None
        except Exception as error:
            if "closed" in f"{type(error).__name__} {error}".lower():
                raise ToolServerDied(f"{self.name} died in a call of {tool}") from error
            raise ToolError(f"{tool}: {_innermost(error)}") from error
        text = "\n".join(p.text if p.type == "text" else f"[{p.type}]" for p in result.content)
        if result.is_error:
            raise ToolError(text)
        return text


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
