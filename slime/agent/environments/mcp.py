"""MCP servers as environments: the policy calls a server's tools until it responds without a call.

The task is an address, or a command that is started for each episode. Prompts come from --prompt-data, the
reward from the run's reward function or from a tool of the server. Options: see docs/environments.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Mapping
from typing import Any

from slime.agent.environments.protocol import EnvironmentFailure, Item, is_number
from slime.agent.session import Budget, Session
from slime.agent.tools import McpServer, Tool, ToolError, ToolServerDied, ToolSet, answer_with_tools
from slime.arguments import PluginArgs
from slime.catalog.deadlines import timeout_s
from slime.utils.errors import RunStopped
from slime.utils.types import Sample

# `tools`: the names that the policy sees.
_OPTIONS: dict[str, Any] = {"system": None, "tools": None, "reward_tool": None, "env_vars": {}}
_OPTIONS |= {"max_chars": 10_000}


def check(task: str) -> None:
    """Raise ValueError: this is called where the run names no file of prompts."""
    raise ValueError(
        f"--env mcp:{task}: an MCP server has no prompts: give --prompt-data and --eval-prompt-data"
    )


async def play(
    args: PluginArgs,
    sample: Sample,
    params: Mapping[str, Any],
    *,
    task: str,
    options: Mapping[str, Any],
    item: Item,
) -> list[Sample]:
    """Play one episode and return its samples; EnvironmentFailure if the server died."""
    if unknown := ", ".join(set(options) - set(_OPTIONS)):
        raise RunStopped(f"--env-args: an MCP server has no option {unknown}; it has {', '.join(_OPTIONS)}")
    own = {**_OPTIONS, **options}
    if not (own["reward_tool"] or args.custom_rm_path or args.rm_type or sample.metadata.get("rm_type")):
        raise RunStopped(
            f"--env mcp:{task} has no reward: add --rm-type or --custom-rm-path, or name its tool "
            'that scores with --env-args \'{"*": {"reward_tool": "NAME"}}\''
        )
    whole = Budget.of_run(args, params)
    of_turn = args.turn_max_response_len or whole.max_new_tokens
    budget = Budget(args.max_turns, whole.max_context_tokens, of_turn, whole.max_new_tokens)
    session = Session.of_run(args, sample, params, budget=budget)
    text = isinstance(item.prompt, str)
    messages = [{"role": "user", "content": item.prompt}] if text else list(item.prompt)
    if own["system"]:
        messages.insert(0, {"role": "system", "content": own["system"]})
    call_s, command = timeout_s(args, "env"), task if "://" in task else shlex.split(task)
    try:
        async with McpServer(command, env=own["env_vars"], call_timeout_s=call_s) as server:
            by_name = {tool.name: tool for tool in server.tools}
            names = own["tools"] or [name for name in by_name if name != own["reward_tool"]]
            if missing := {*names, own["reward_tool"]} - {*by_name, None}:
                raise RunStopped(
                    f"--env mcp:{task}: the server has {list(by_name)}, not {', '.join(missing)}"
                )
            tools = ToolSet([by_name[name] for name in names], call_s, own["max_chars"])
            with contextlib.suppress(TimeoutError):  # what there is then is scored
                async with asyncio.timeout(timeout_s(args, "episode") or None):
                    await answer_with_tools(session, messages, tools)
            said = next((one["content"] for one in messages[::-1] if one["role"] == "assistant"), "")
            values = {"prompt": item.prompt, "response": said, "label": item.label}
            score = await _score(by_name[own["reward_tool"]], values) if own["reward_tool"] else 0.0
    except ToolServerDied as error:
        raise EnvironmentFailure(str(error)) from error
    session.num_tool_errors += tools.num_errors
    return session.samples(sample, reward=score, extra_metadata=tools.counts, args=args)


async def _score(tool: Tool, values: Mapping[str, Any]) -> float:
    """Call the tool that scores, with those of the values that it takes."""
    taken = {name: value for name, value in values.items() if name in tool.parameters.get("properties", {})}
    try:
        score = float(await tool.call(**taken))
    except (ToolError, ValueError) as error:
        raise EnvironmentFailure(f"the tool {tool.name}, which scores, failed: {error}") from error
    if not is_number(score):
        raise EnvironmentFailure(f"the tool {tool.name}, which scores, returned {score}")
    return score
