"""Calls as JSON objects: between tags (Qwen, Hermes, SmolLM) or bare (Llama 3)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slime.agent.parsing.plain import Read

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"


def parse_hermes(text: str, schemas: Mapping[str, Any]) -> Read:
    """`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number of them."""
    uses: list[dict[str, Any]] = []
    for match in _TAGGED.finditer(text):
        read = _calls_in(match.group(1))
        if read is None or not match.group(0).endswith("</tool_call>"):
            return text, [], True
        uses.extend(read)
    if not uses:
        return text, [], False
    return _TAGGED.sub("", text).strip(), uses, False


def parse_llama3(text: str, schemas: Mapping[str, Any]) -> Read:
    """`{"name": "add", "parameters": {"a": 1}}`, several with semicolons between, and no text beside."""
    body = text.strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).strip()
    if not body.startswith("{"):
        return text, [], False
    uses: list[dict[str, Any]] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except ValueError:
            return text, [], tagged or _looks_like_call(body)
        call = _call(value)
        if call is None:
            return text, [], tagged
        uses.append(call)
        at = len(body) - len(body[at:].lstrip("; \n"))
    return "", uses, False


def _looks_like_call(body: str) -> bool:
    return body.startswith("{") and '"name"' in body[:200]


def _calls_in(body: str) -> list[dict[str, Any]] | None:
    """One object, or a list of them; None where it is no call."""
    try:
        value = json.loads(body)
    except ValueError:
        return None
    calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
    return None if not calls or None in calls else [call for call in calls if call is not None]


def _call(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    return {"name": value["name"], "input": given} if isinstance(given, dict) else None
