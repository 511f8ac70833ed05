"""A model's raw text -> thoughts, text and tool calls, by its family (`slime.catalog.tool_formats`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.parsing import from_sglang
from slime.agent.parsing.output import ParsedModelOutput, Parser, split_thoughts
from slime.agent.parsing.plain import Read
from slime.catalog.tool_formats import TOOL_FORMATS, recognised
from slime.utils.misc import load_function

__all__ = ["FormatParser", "ParsedModelOutput", "Parser", "format_of", "parse_model_output", "parser_for"]

# Names that SGLang and slime users know a format by.
_ALIASES = {row.sglang_name: name for name, row in TOOL_FORMATS.items() if row.sglang_name is not None} | {
    "qwen": "hermes",
    "qwen3": "hermes",
    "glm47": "glm",
    "deepseekv31": "deepseek",
    "deepseek_v3": "deepseek",
    "llama4": "pythonic",
}
_NO_THOUGHTS = ("none", "off")


def format_of(name: str) -> str:
    """The row of the table that a name means; ValueError with the names there are."""
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
    """Split an answer. Without a parser's name calls are read as Qwen3-Coder writes them, if there are tools.

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
    schemas = {
        str(schema["name"]): schema for schema in map(_function, tools_schema or ()) if "name" in schema
    }
    if not tools_schema or tool_parser_name == "plain":
        return ParsedModelOutput(thoughts, text)
    return ParsedModelOutput(thoughts, *_read(text, tool_parser_name or "qwen3_coder", schemas))


def _read(text: str, parser: str, schemas: dict[str, Any]) -> Read:
    """Calls that a client can be told; a model may write any others, as deep as it likes."""
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
    """The parser of a model: of the named format, else of the one that its chat template teaches it."""
    from_sglang.check_names(tool_parser, reasoning_parser)
    if tool_parser and from_sglang.is_sglangs(tool_parser):
        return FormatParser(tool_parser, reasoning_parser)
    template = tokenizer.chat_template or ""
    name = format_of(tool_parser) if tool_parser else recognised(str(template))
    return FormatParser(name, reasoning_parser)


class FormatParser:
    """Reads answers in one format of the table, or of SGLang."""

    def __init__(self, tool_format: str, reasoning_parser: str | None = None) -> None:
        self.tool_format, self.reasoning_parser = tool_format, reasoning_parser
        sglangs = from_sglang.is_sglangs(tool_format)
        self.starts = from_sglang.starts_of(tool_format) if sglangs else TOOL_FORMATS[tool_format].starts
        self.needs_all = from_sglang.is_sglangs(reasoning_parser)  # to tell thoughts from the rest

    def __call__(self, raw: str, tools: Sequence[Any], opens_thought: bool) -> ParsedModelOutput:
        return parse_model_output(
            raw,
            tools_schema=tools,
            tool_parser_name=self.tool_format,
            reasoning_parser_name=self.reasoning_parser,
            opens_thought=opens_thought,
        )


def _function(tool: Any) -> Mapping[str, Any]:
    """A tool as OpenAI wraps it, or bare."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return inner if isinstance(inner, Mapping) else {}
