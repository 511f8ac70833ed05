"""Finds the turn that a conversation continues: clients send the whole conversation, in their own form.

Messages are compared as they are. Responses of the policy are compared by the ids of their tool calls, their
text, and their thoughts if the client sends thoughts back. Clients reorder keys, add arguments to calls and
leave empty fields out; none of that counts as an edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.agent.trajectory import Message, TurnNode

THOUGHTS = "reasoning_content"  # the key by which templates know them


def remember(node: TurnNode, messages: Sequence[Message], answer: Message, tools: Sequence[Any]) -> None:
    """Keep the new messages of a turn and its response, by which it is found again."""
    before = node.parent
    # Clients send their tools with every request; one copy is kept.
    node.tools = before.tools if before is not None else list(tools)
    node.messages, node.answer = [dict(message) for message in messages], dict(answer)
    node.has_thoughts = bool(answer.get(THOUGHTS)) or (before is not None and before.has_thoughts)


def find_continued(
    nodes: Sequence[TurnNode], messages: Sequence[Message], tools: Sequence[Any]
) -> tuple[TurnNode | None, int]:
    """Return the last turn that `messages` continue, and the number of messages that it covers."""
    wanted = list(tools)  # another list of tools is another conversation
    best: TurnNode | None = None
    covered: dict[TurnNode | None, int] = {None: 0}
    for node in nodes:  # a parent comes before its turns
        start = covered.get(node.parent)
        if start is None or (node.parent is None and node.tools != wanted):
            continue
        end = start + len(node.messages)
        if end >= len(messages) or messages[start:end] != node.messages:
            continue
        if is_answer(node.answer, messages[end]):
            covered[node] = end + 1
            best = node if end + 1 >= covered[best] else best  # of equals the later one
    return best, covered[best]


def conversation(node: TurnNode) -> list[Message]:
    """Return all messages up to and including the response of a turn."""
    return [message for turn in node.chain() for message in (*turn.messages, turn.answer)]


def is_answer(answer: Message, given: Message) -> bool:
    """Return whether `given`, which a client sent, is this response of the policy."""
    if given == answer:
        return True
    if given.get("role") != "assistant" or _call_ids(answer) != _call_ids(given):
        return False
    if not _same_text(answer.get("content"), given.get("content")):
        return False
    thoughts = given.get(THOUGHTS)  # None: this client does not send thoughts back
    return thoughts is None or _same_text(answer.get(THOUGHTS), thoughts)


def _call_ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _same_text(ours: Any, theirs: Any) -> bool:
    if not isinstance(theirs, str | None):
        return bool(ours == theirs)
    return (ours or "").strip() == (theirs or "").strip()
