"""Finds the turn that a conversation continues: clients send the whole conversation, in their own form.

Messages are compared as they are. Responses of the policy are compared by the ids of their tool calls, their
text, and their thoughts if the client sends thoughts back. Clients reorder keys, add arguments to calls and
leave empty fields out; none of that counts as an edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent.trajectory import TurnNode

Message = dict[str, Any]
THOUGHTS = "reasoning_content"  # the key by which templates know them


@dataclass(slots=True)
class Said:
    """The new messages of one turn, and the response of the policy."""

    messages: list[Message]
    answer: Message
    node: TurnNode
    tools: list[Any]  # another list of tools is another conversation
    parent: Said | None = None
    children: list[Said] = field(default_factory=list)
    has_thoughts: bool = False  # this response or an earlier one

    def chain(self) -> list[Said]:
        out: list[Said] = []
        said: Said | None = self
        while said is not None:
            out.append(said)
            said = said.parent
        return out[::-1]

    def conversation(self) -> list[Message]:
        """Return all messages up to and including the response."""
        return [message for said in self.chain() for message in (*said.messages, said.answer)]


class History:
    """The conversations of one session."""

    def __init__(self) -> None:
        self._roots: list[Said] = []
        self._by_turn: dict[TurnNode, Said] = {}

    def find(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[Said | None, int]:
        """Return the last turn that `messages` continue, and the number of messages that it covers."""
        wanted = list(tools)
        best: tuple[Said | None, int] = (None, 0)
        open_ends = [(root, 0) for root in self._roots if root.tools == wanted]
        while open_ends:
            said, start = open_ends.pop()
            end = start + len(said.messages)
            if end >= len(messages) or messages[start:end] != said.messages:
                continue
            if is_answer(said.answer, messages[end]):
                if end + 1 > best[1]:  # of equals the later one, which is visited first
                    best = (said, end + 1)
                open_ends.extend((child, end + 1) for child in said.children)
        return best

    def said(self, node: TurnNode, tools: Sequence[Any]) -> Said:
        """Return the entry of a turn; ValueError for another session's turn, or with other tools."""
        found = self._by_turn.get(node)
        if found is None:
            raise ValueError("`after` is no response of this session")
        if found.tools != list(tools):
            raise ValueError("`after` was given with other tools: send the whole conversation")
        return found

    def conversation(self, node: TurnNode) -> list[Message]:
        """Return all messages up to and including the response of a turn."""
        return self._by_turn[node].conversation()

    def add(
        self,
        parent: Said | None,
        messages: Sequence[Message],
        answer: Message,
        node: TurnNode,
        tools: Sequence[Any],
    ) -> Said:
        # Clients send their tools with every request; one copy is kept.
        kept = parent.tools if parent is not None else list(tools)
        said = Said([dict(message) for message in messages], dict(answer), node, kept, parent)
        said.has_thoughts = bool(answer.get(THOUGHTS)) or (parent is not None and parent.has_thoughts)
        (self._roots if parent is None else parent.children).append(said)
        self._by_turn[node] = said
        return said


def is_answer(answer: Message, given: Message) -> bool:
    """Return whether `given`, which a client sent, is this response of the policy."""
    if given == answer:
        return True
    if given.get("role") != "assistant":
        return False
    if _call_ids(answer) != _call_ids(given):
        return False
    if not _same_text(answer.get("content"), given.get("content")):
        return False
    thoughts = given.get(THOUGHTS)  # None: this client does not send thoughts back
    return thoughts is None or _same_text(answer.get(THOUGHTS), thoughts)


def _call_ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _same_text(ours: Any, theirs: Any) -> bool:
    return (
        (ours or "").strip() == (theirs or "").strip() if isinstance(theirs, str | None) else ours == theirs
    )
