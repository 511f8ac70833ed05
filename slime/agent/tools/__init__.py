"""Tools for agents: a registry of typed functions, and common tools."""

from slime.agent.tools.calculator import calculate, calculator
from slime.agent.tools.in_box import BoxTools
from slime.agent.tools.mcp_client import McpServer
from slime.agent.tools.registry import (
    Tool,
    ToolError,
    ToolResult,
    ToolServerDied,
    ToolSet,
    answer_with_tools,
    tool_of,
)
from slime.agent.tools.search import Corpus
from slime.rollout.episode_record import call_id

__all__ = [
    "BoxTools",
    "Corpus",
    "McpServer",
    "Tool",
    "ToolError",
    "ToolResult",
    "ToolServerDied",
    "ToolSet",
    "answer_with_tools",
    "calculate",
    "calculator",
    "call_id",
    "tool_of",
]
