"""Which of the turns that exist a conversation continues: clients send it whole, and in their own words.

Messages are compared as they are, answers of the policy by what makes them that answer: the ids of their
tool calls, their text, and their thoughts where the client sends thoughts back. Clients reorder keys, add
arguments to calls and leave empty fields out; none of that is an edit.
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
    """The messages that came before one turn and were new with it, and what the policy answered."""

    messages: list[Message]
    answer: Message
    node: TurnNode
    tools: list[Any]  # of the conversation: another list of tools is another conversation
    parent: Said | None = None
    children: list[Said] = field(default_factory=list)
    has_thoughts: bool = False  # this answer or one before it

    def chain(self) -> list[Said]:
        out: list[Said] = []
        said: Said | None = self
        while said is not None:
            out.append(said)
            said = said.parent
        return out[::-1]

    def conversation(self) -> list[Message]:
        """All messages up to and including the answer, with the answers as the policy gave them."""
        return [message for said in self.chain() for message in (*said.messages, said.answer)]


class History:
    """The conversations of one session."""

    def __init__(self) -> None:
        self._roots: list[Said] = []
        self._by_turn: dict[TurnNode, Said] = {}
        # The turn that was answered last, with its conversation: nearly always the one that goes on.
        self._tip: tuple[Said, list[Message]] | None = None

    def find(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[Said | None, int]:
        """The last turn that `messages` continues, and how many of them are known by that."""
        wanted = list(tools)
        if self._tip is not None:
            said, conversation = self._tip
            known = len(conversation)
            if len(messages) > known and messages[:known] == conversation and said.tools == wanted:
                return said, known
        best: tuple[Said | None, int] = (None, 0)
        open_ends = [(root, 0) for root in self._roots if root.tools == wanted]
        while open_ends:
            said, start = open_ends.pop()
            end = start + len(said.messages)
            if end >= len(messages) or messages[start:end] != said.messages:
                continue
            if is_answer(said.answer, messages[end]):
                if end + 1 > best[1]:  # of equals the later one, which is looked at first
                    best = (said, end + 1)
                open_ends.extend((child, end + 1) for child in said.children)
        return best

    def said(self, node: TurnNode, tools: Sequence[Any]) -> Said:
        """What a turn of this session is known by; ValueError for another's, or with other tools."""
        found = self._by_turn.get(node)
        if found is None:
            raise ValueError("`after` is no answer of this session")
        if found.tools != list(tools):
            raise ValueError("`after` was given with other tools: send the whole conversation")
        return found

    def conversation(self, node: TurnNode) -> list[Message]:
        """All messages up to and including the answer of a turn."""
        return self._by_turn[node].conversation()

    def add(
        self,
        parent: Said | None,
        messages: Sequence[Message],
        answer: Message,
        node: TurnNode,
        tools: Sequence[Any],
    ) -> Said:
        # Clients send their tools with every request: one copy is enough.
        kept = parent.tools if parent is not None else list(tools)
        said = Said([dict(message) for message in messages], dict(answer), node, kept, parent)
        said.has_thoughts = bool(answer.get(THOUGHTS)) or (parent is not None and parent.has_thoughts)
        (self._roots if parent is None else parent.children).append(said)
        self._by_turn[node] = said
        if self._tip is not None and self._tip[0] is parent:
            conversation = self._tip[1]
            conversation += [*said.messages, said.answer]
        else:
            conversation = said.conversation()
        self._tip = (said, conversation)
        return said


def is_answer(answer: Message, given: Message) -> bool:
    """Whether `given`, which a client sent, is this answer of the policy."""
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
