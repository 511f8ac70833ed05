"""Parses a model's raw output into reasoning, text and tool calls, in the format of its family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent.parsing import from_sglang
from slime.agent.parsing.formats import Read
from slime.catalog.tool_formats import TOOL_FORMATS, recognised
from slime.utils.misc import load_function

THINK_START, THINK_END = "<think>", "</think>"
_NO_THOUGHTS = ("none", "off")
# Names by which users of SGLang and slime know a format.
_ALIASES = {row.sglang_name: name for name, row in TOOL_FORMATS.items() if row.sglang_name is not None} | {
    "qwen": "hermes",
    "qwen3": "hermes",
    "glm47": "glm",
    "deepseekv31": "deepseek",
    "deepseek_v3": "deepseek",
    "llama4": "pythonic",
}


@dataclass(slots=True)
class ParsedModelOutput:
    """The parts of a response; tool uses are `{"name": "add", "input": {"a": 1}}`.

    With `ill_formed`, the model started a tool call that cannot be parsed; it is then part of `text`.
    """

    reasoning: str = ""
    text: str = ""
    tool_uses: list[dict[str, Any]] = field(default_factory=list)
    ill_formed: bool = False


# Splits a response; takes its text, the tools, and whether the prompt ended inside a thought.
Parser = Callable[[str, Sequence[Any], bool], ParsedModelOutput]


def split_thoughts(raw: str, opens_thought: bool = False) -> tuple[str, str]:
    """Return (thoughts, the rest). Where a thought is not closed, the response is truncated: no rest."""
    head, closed, rest = raw.partition(THINK_END)
    inner = head.lstrip()
    starts = opens_thought or inner.startswith(THINK_START)
    if not starts and (not closed or THINK_START in head):
        return "", raw
    return inner.removeprefix(THINK_START).strip(), rest.lstrip("\n")


def plain_parser(raw: str, tools: Sequence[Any], opens_thought: bool) -> ParsedModelOutput:
    """Split off thoughts only: for models and tasks without tools."""
    return ParsedModelOutput(*split_thoughts(raw, opens_thought))


def format_of(name: str) -> str:
    """Return the row of the table that a name means; ValueError lists the names."""
    key = _ALIASES.get(name, name)
    if key not in TOOL_FORMATS:
        raise ValueError(f"there is no tool format {name!r}; use one of {sorted({*TOOL_FORMATS, *_ALIASES})}")
    return key


def parse_model_output(
    raw: str,
    *,
    tools_schema: Sequence[Mapping[str, Any]] | None = None,
    tool_parser_name: str | None = None,
    reasoning_parser_name: str | None = None,
    opens_thought: bool = False,
) -> ParsedModelOutput:
    """Split a response. Without a parser's name, calls are read as Qwen3-Coder writes them.

    `reasoning_parser_name` "none" leaves thoughts in the text; every other name reads <think> and </think>.
    "sglang:NAME" is SGLang's own parser, of calls or of thoughts, where SGLang is installed.
    """
    from_sglang.check_names(tool_parser_name, reasoning_parser_name)
    if reasoning_parser_name in _NO_THOUGHTS:
        thoughts, text = "", raw
    elif reasoning_parser_name and from_sglang.is_sglangs(reasoning_parser_name):
        thoughts, text = from_sglang.split_thoughts(raw, reasoning_parser_name, opens_thought)
    else:
        thoughts, text = split_thoughts(raw, opens_thought)
    if not tools_schema or tool_parser_name == "plain":
        return ParsedModelOutput(thoughts, text)
    functions = [tool.get("function", tool) for tool in tools_schema]  # as OpenAI wraps it, or bare
    schemas = {str(schema["name"]): schema for schema in functions if "name" in schema}
    return ParsedModelOutput(thoughts, *_read(text, tool_parser_name or "qwen3_coder", schemas))


def _read(text: str, parser: str, schemas: dict[str, Any]) -> Read:
    """Read calls that JSON can write for a client; a model may write others, as deep as it likes."""
    name = None if from_sglang.is_sglangs(parser) else format_of(parser)
    try:
        if name is None:
            read = from_sglang.read_calls(text, parser, list(schemas.values()))
        else:
            read = load_function(TOOL_FORMATS[name].function)(text, schemas)
        json.dumps(read[1], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):  # NaN, half of a surrogate pair, Python's own values
        return text, [], True
    return read


def parser_for(tokenizer: Any, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Parser:
    """Return the parser of a model: the named format, or the one that its chat template teaches it."""
    from_sglang.check_names(tool_parser, reasoning_parser)
    if not tool_parser:
        name = recognised(str(tokenizer.chat_template or ""))
    else:
        name = tool_parser if from_sglang.is_sglangs(tool_parser) else format_of(tool_parser)

    def parse(raw: str, tools: Sequence[Any], opens_thought: bool) -> ParsedModelOutput:
        return parse_model_output(
            raw,
            tools_schema=tools,
            tool_parser_name=name,
            reasoning_parser_name=reasoning_parser,
            opens_thought=opens_thought,
        )

    return parse
