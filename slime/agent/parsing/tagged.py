"""Calls in tags, whose values are text until the tool's schema says what they are: Qwen3-Coder and GLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slime.agent.parsing.plain import Read

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_BARE_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def parse_qwen3_coder(text: str, schemas: Mapping[str, Any]) -> Read:
    """`<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`."""
    pattern = _CALL if "<tool_call>" in text else _BARE_FUNCTION
    uses: list[dict[str, Any]] = []
    for match in pattern.finditer(text):
        inner = match.group(1) if pattern is _CALL else match.group(0)
        found = list(_FUNCTION.finditer(inner))
        if not found or len(found) != inner.count("<function="):
            return text, [], True
        for function in found:
            name, body = function.group(1).strip(), function.group(2)
            values = {key.strip(): _trimmed(value) for key, value in _PARAMETER.findall(body)}
            if len(values) != body.count("<parameter="):
                return text, [], True
            uses.append({"name": name, "input": _typed(values, schemas.get(name))})
    return (pattern.sub("", text).strip(), uses, False) if uses else (text, [], False)


def parse_glm(text: str, schemas: Mapping[str, Any]) -> Read:
    """`<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`."""
    uses: list[dict[str, Any]] = []
    for match in _CALL.finditer(text):
        body = match.group(1)
        name = body.partition("<arg_key>")[0].strip()
        values = {key.strip(): _trimmed(value) for key, value in _ARGUMENT.findall(body)}
        complete = match.group(0).endswith("</tool_call>") and len(values) == body.count("<arg_key>")
        if not name or "\n" in name or "<" in name or not complete:
            return text, [], True
        uses.append({"name": name, "input": _typed(values, schemas.get(name))})
    return (_CALL.sub("", text).strip(), uses, False) if uses else (text, [], False)


def _trimmed(value: str) -> str:
    """The text without the one line break that templates write on either side."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(values: Mapping[str, str], schema: Any) -> dict[str, Any]:
    parameters = (schema or {}).get("parameters") or (schema or {}).get("input_schema") or {}
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return {key: _value(value, (properties or {}).get(key)) for key, value in values.items()}


def _value(text: str, schema: Any) -> Any:
    """Text stays text where the schema says so; else JSON is read where it is JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    if kind == "boolean" and text.strip() in ("True", "False"):
        return text.strip() == "True"
    try:
        return json.loads(text)
    except ValueError:
        return text
