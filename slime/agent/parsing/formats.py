"""Parsers of tool calls, one for each row of `catalog/tool_formats.py`.

Each takes the text of a response without its thoughts and the schemas of the tools by name, and returns the
text that remains, the calls as `{"name", "input"}`, and whether a call was started that cannot be read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

Read = tuple[str, list[dict[str, Any]], bool]
Uses = list[dict[str, Any]]

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_BARE_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_DEEPSEEK_START, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED = re.compile(r"^\s*([^\n]+)\n```(?:json)?\n(.*?)\n?```\s*$", re.DOTALL)


def parse_plain(text: str, schemas: Mapping[str, Any]) -> Read:
    """Read no calls: everything is text."""
    return text, [], False


# -- JSON objects: between tags (Qwen, Hermes, SmolLM) or bare (Llama 3)


def parse_hermes(text: str, schemas: Mapping[str, Any]) -> Read:
    """Read `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number of them."""
    uses: Uses = []
    for match in _CALL.finditer(text):
        read = _json_calls(match.group(1))
        if read is None or not match.group(0).endswith("</tool_call>"):
            return text, [], True
        uses.extend(read)
    return _result(text, _CALL, uses)


def parse_llama3(text: str, schemas: Mapping[str, Any]) -> Read:
    """Read `{"name": "add", "parameters": {"a": 1}}`, several separated by semicolons, without other text."""
    body = text.strip()
    tagged = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        return text, [], False
    uses: Uses = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except ValueError:
            return text, [], tagged or '"name"' in body[:200]
        call = _json_call(value)
        if call is None:
            return text, [], tagged
        uses.append(call)
        at = len(body) - len(body[at:].lstrip("; \n"))
    return "", uses, False


def _json_calls(body: str) -> Uses | None:
    """Return the calls of one object or a list of objects; None where one is no call."""
    try:
        value = json.loads(body)
    except ValueError:
        return None
    calls = [_json_call(one) for one in (value if isinstance(value, list) else [value])]
    return None if not calls or None in calls else [call for call in calls if call is not None]


def _json_call(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    return {"name": value["name"], "input": given} if isinstance(given, dict) else None


def parse_deepseek(text: str, schemas: Mapping[str, Any]) -> Read:
    """Read special tokens around a name and JSON, fenced (V3, R1) or bare (V3.1)."""
    before, begun, body = text.partition(_DEEPSEEK_START)
    if not begun:
        return text, [], False
    body = body.partition(_DEEPSEEK_END)[0]
    uses: Uses = []
    for kind, rest in _DEEPSEEK_CALL.findall(body):
        fenced = _FENCED.match(rest)
        name, arguments = fenced.groups() if fenced else (kind, rest)
        try:
            given = json.loads(arguments)
        except ValueError:
            return text, [], True
        if not isinstance(given, dict):
            return text, [], True
        uses.append({"name": name.strip(), "input": given})
    if not uses or len(uses) != body.count("<｜tool▁call▁begin｜>"):
        return text, [], True
    return before.strip(), uses, False


# -- Python's syntax: nothing is executed


def parse_pythonic(text: str, schemas: Mapping[str, Any]) -> Read:
    """Read `[add(a=1, b=2), look(at="it")]`: a list of calls with named literal arguments is all there is."""
    body = text.strip().removeprefix(_PYTHON_START).removesuffix(_PYTHON_END).strip()
    if not body.startswith("["):
        return text, [], False
    begun = any(body.startswith(f"[{name}(") for name in schemas)
    try:
        tree = ast.parse(body, mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError("not a list of calls")
        uses = [_python_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text, [], begun
    return ("", uses, False) if uses else (text, [], False)


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("not a call with named arguments")
    given = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return {"name": ast.unparse(node.func), "input": given}


# -- tags around values, which are text until the tool's schema says what they are


def parse_qwen3_coder(text: str, schemas: Mapping[str, Any]) -> Read:
    """Read `<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`."""
    pattern = _CALL if "<tool_call>" in text else _BARE_FUNCTION
    uses: Uses = []
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
    return _result(text, pattern, uses)


def parse_glm(text: str, schemas: Mapping[str, Any]) -> Read:
    """Read `<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`."""
    uses: Uses = []
    for match in _CALL.finditer(text):
        body = match.group(1)
        name = body.partition("<arg_key>")[0].strip()
        values = {key.strip(): _trimmed(value) for key, value in _ARGUMENT.findall(body)}
        complete = match.group(0).endswith("</tool_call>") and len(values) == body.count("<arg_key>")
        if not name or "\n" in name or "<" in name or not complete:
            return text, [], True
        uses.append({"name": name, "input": _typed(values, schemas.get(name))})
    return _result(text, _CALL, uses)


def _result(text: str, pattern: re.Pattern[str], uses: Uses) -> Read:
    return (pattern.sub("", text).strip(), uses, False) if uses else (text, [], False)


def _trimmed(value: str) -> str:
    """Remove the one line break that templates write on either side."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(values: Mapping[str, str], schema: Any) -> dict[str, Any]:
    parameters = (schema or {}).get("parameters") or (schema or {}).get("input_schema") or {}
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return {key: _value(value, (properties or {}).get(key)) for key, value in values.items()}


def _value(text: str, schema: Any) -> Any:
    """Keep text where the schema asks for a string; otherwise read JSON where it is JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    if kind == "boolean" and text.strip() in ("True", "False"):
        return text.strip() == "True"
    try:
        return json.loads(text)
    except ValueError:
        return text
