"""An agent whose tools are those of an MCP server: `generate` is a --custom-generate-function-path."""

import asyncio
import sys
from pathlib import Path

from slime.agent.session import Budget, Session
from slime.agent.tools import McpServer, ToolSet, answer_with_tools

BUDGET = Budget(max_turns=3, max_context_tokens=200, max_new_tokens=48)
_servers: dict[asyncio.AbstractEventLoop, asyncio.Task[McpServer]] = {}


async def server() -> McpServer:
    """One server for all episodes of this process; it ends with the process."""
    loop = asyncio.get_running_loop()
    if loop not in _servers:
        command = [sys.executable, str(Path(__file__).with_name("server.py"))]
        _servers[loop] = asyncio.ensure_future(McpServer(command).__aenter__())
    return await asyncio.shield(_servers[loop])


async def generate(args, sample, sampling_params):
    session = Session.of_run(args, sample, sampling_params, budget=BUDGET)
    tools = ToolSet((await server()).tools, max_chars=60)
    answer = await answer_with_tools(session, [{"role": "user", "content": sample.prompt}], tools)
    right = float(answer.strip() == sample.label)
    return session.samples(sample, reward=right, extra_metadata=tools.counts, args=args)
