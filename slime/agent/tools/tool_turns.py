"""The plainest agent: turns with tools until the model answers without a call."""

from __future__ import annotations

from typing import Any

from slime.agent.session import Session, SessionError
from slime.agent.tools.registry import ToolSet


async def answer_with_tools(session: Session, messages: list[dict[str, Any]], tools: ToolSet) -> str:
    """What the model says when it calls no tool any more; "" where a budget of the session ends it before.

    `messages` grows by each turn and its results. The session knows how it ended (`Session.end`).

    Example: `answer = await answer_with_tools(session, [{"role": "user", "content": "6 * 7?"}], tools)`.
    """
    new, said = list(messages), None
    try:
        while True:
            said = await session.turn(new, tools=tools.schemas, after=said)
            messages.append(said.message)
            if not said.tool_calls:
                return said.text
            new = await tools.answer(said.tool_calls)
            messages += new
    except SessionError as error:
        session.end(error.outcome, str(error))
        return ""
