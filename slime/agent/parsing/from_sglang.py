"""SGLang's own parsers, for families without a row in our table: `tool_parser="sglang:kimi_k2"`.

They are imported into this process, so SGLang must be installed in the Python that runs slime. A name without
the prefix means our own parser.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from slime.engines.sglang.run_server import declare_torchvision_operators
from slime.utils.misc import is_installed

PREFIX = "sglang:"


def is_sglangs(name: str | None) -> bool:
    return bool(name) and str(name).startswith(PREFIX)


def check_names(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ValueError if SGLang is not installed or has no parser of that name."""
    for kind, full_name in (("tool_parser", tool_parser), ("reasoning_parser", reasoning_parser)):
        if not is_sglangs(full_name):
            continue
        if not is_installed("sglang"):
            raise ValueError(
                f"{kind} {full_name!r} needs SGLang in the Python that runs slime, which has none; "
                "install it there, or name a format of our own (docs/catalog.md)"
            )
        calls = kind == "tool_parser"
        known = _call_parser().ToolCallParserEnum if calls else _thought_parser().DetectorMap
        name = str(full_name).removeprefix(PREFIX)
        if name not in known:
            raise ValueError(f"SGLang has no {kind} {name!r}; it has {', '.join(sorted(known))}")


def split_thoughts(raw: str, name: str, opens_thought: bool) -> tuple[str, str]:
    """Return (thoughts, the rest), as SGLang's server would."""
    parser = _thought_parser()(
        name.removeprefix(PREFIX), stream_reasoning=False, force_reasoning=True if opens_thought else None
    )
    thoughts, rest = parser.parse_non_stream(raw)
    return thoughts or "", rest or ""


def read_calls(
    text: str, name: str, schemas: Sequence[Mapping[str, Any]]
) -> tuple[str, list[dict[str, Any]], bool]:
    """Read tool calls like the functions of `formats`. What SGLang cannot read stays text."""
    parser = _reader(name, schemas)
    if not parser.has_tool_call(text):
        return text, [], False
    try:
        rest, calls = parser.parse_non_stream(text)
        uses = [{"name": call.name, "input": json.loads(call.parameters or "{}")} for call in calls]
    except Exception:  # each of its readers fails in a way of its own on what a model may write
        return text, [], True
    if not uses or not all(isinstance(use["input"], dict) and use["name"] for use in uses):
        return text, [], True
    return rest, uses, False


def _reader(name: str, schemas: Sequence[Mapping[str, Any]]) -> Any:
    tool = importlib.import_module("sglang.srt.entrypoints.openai.protocol").Tool
    tools = [tool(type="function", function=dict(schema)) for schema in schemas]
    return _call_parser()(tools, name.removeprefix(PREFIX))


@functools.cache
def _call_parser() -> Any:
    # The agent itself handles a call of an unknown tool; SGLang must not drop it.
    os.environ.setdefault("SGLANG_FORWARD_UNKNOWN_TOOLS", "1")
    return _loaded("sglang.srt.function_call.function_call_parser").FunctionCallParser


@functools.cache
def _thought_parser() -> Any:
    return _loaded("sglang.srt.parser.reasoning_parser").ReasoningParser


def _loaded(module: str) -> Any:
    """Import a module; if torchvision was built for another machine, declare its operators first."""
    if is_installed("torchvision"):
        try:
            importlib.import_module("torchvision")
        except (RuntimeError, OSError):
            declare_torchvision_operators()
    return importlib.import_module(module)
