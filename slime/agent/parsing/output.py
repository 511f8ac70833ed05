"""What a parser makes of a model's raw text, and the one that only splits thoughts off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

THINK_START, THINK_END = "<think>", "</think>"


@dataclass(slots=True)
class ParsedModelOutput:
    """Example: `ParsedModelOutput("I add.", "", [{"name": "add", "input": {"a": 1}}], ill_formed=False)`.

    With `ill_formed` the model began a tool call that cannot be read; what it wrote is then in `text`.
    """

    reasoning: str = ""
    text: str = ""
    tool_uses: list[dict[str, Any]] = field(default_factory=list)
    ill_formed: bool = False


class Parser(Protocol):
    """`opens_thought`: the prompt ended inside a thought, so the text begins with it."""

    starts: tuple[str, ...]  # how a tool call begins

    def __call__(self, raw: str, tools: Sequence[Any], opens_thought: bool) -> ParsedModelOutput: ...


def split_thoughts(raw: str, opens_thought: bool = False) -> tuple[str, str]:
    """(thoughts, the rest). A thought that is not closed is all there is: the answer was cut."""
    head, closed, rest = raw.partition(THINK_END)
    inner = head.lstrip()
    if closed and (opens_thought or inner.startswith(THINK_START) or THINK_START not in head):
        return inner.removeprefix(THINK_START).strip(), rest.lstrip("\n")
    if not closed and (opens_thought or inner.startswith(THINK_START)):
        return inner.removeprefix(THINK_START).strip(), ""
    return "", raw


class PlainParser:
    """Thoughts and text: for models and tasks without tools."""

    starts: tuple[str, ...] = ()

    def __call__(self, raw: str, tools: Sequence[Any], opens_thought: bool) -> ParsedModelOutput:
        thoughts, text = split_thoughts(raw, opens_thought)
        return ParsedModelOutput(thoughts, text)


plain_parser = PlainParser()
