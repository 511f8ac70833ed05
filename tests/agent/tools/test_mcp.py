"""MCP servers as tool sets, with a real server over its input and output, and over HTTP."""

import asyncio
import socket
import subprocess
import sys

import pytest

pytest.importorskip("mcp", reason="pip install 'slime-rl[mcp]'")

from patience import LONG_S

from slime.agent.tools import McpServer, ToolServerDied, ToolSet

SERVER = '''
import os, sys
import uvicorn
from mcp.server import MCPServer

server = MCPServer("numbers")


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


@server.tool()
def refuse() -> str:
    """Always fails."""
    raise ValueError("not today")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if len(sys.argv) > 1:
    uvicorn.run(server.streamable_http_app(), fd=int(sys.argv[1]))
else:
    server.run()
'''


@pytest.fixture
def command(tmp_path):
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return [sys.executable, str(file)]


def in_server(server, work):
    async def inner():
        async with McpServer(server, start_timeout_s=LONG_S) as started:
            return await work(ToolSet(started.tools))

    return asyncio.run(inner())


async def try_tools(tools):
    assert set(tools.by_name) == {"add", "refuse", "die"}
    assert tools.by_name["add"].description == "The sum of two numbers."
    assert (await tools.call("add", {"a": 2, "b": 3})).text == "5"
    assert "needs the argument 'b'" in (await tools.call("add", {"a": 2})).text
    assert (await tools.call("refuse")).is_error
    both = await asyncio.gather(*(tools.call("add", {"a": i, "b": i}) for i in range(5)))
    assert [one.text for one in both] == ["0", "2", "4", "6", "8"]


def test_a_program_is_a_tool_set(command):
    in_server(command, try_tools)


def test_a_server_that_dies_in_a_call_is_named(command):
    async def work(tools):
        with pytest.raises(ToolServerDied, match=r"server\.py"):
            await tools.call("die")
        with pytest.raises(ToolServerDied, match=r"server\.py"):
            await tools.call("add", {"a": 1, "b": 1})

    in_server(command, work)


def test_a_program_that_is_no_server_is_named_with_what_it_said(tmp_path):
    async def work(tools):
        raise AssertionError("not reached")

    speaks = [sys.executable, "-c", "import sys; sys.exit('no such file')"]
    with pytest.raises(ToolServerDied, match=r"does not answer as an MCP server"):
        in_server(speaks, work)
    with pytest.raises(ToolServerDied, match="no/such/program"):
        in_server(["no/such/program"], work)


def test_an_address_is_a_tool_set(command):
    """The server is given a socket that listens already: its port was never free for another to take."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        fd, port = listening.fileno(), listening.getsockname()[1]
        server = subprocess.Popen([*command, str(fd)], pass_fds=[fd], stderr=subprocess.DEVNULL)
    try:
        in_server(f"http://127.0.0.1:{port}/mcp", try_tools)
    finally:
        server.kill()
        server.wait()
