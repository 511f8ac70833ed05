"""DeepSeek's calls: special tokens around a name and JSON, fenced (V3, R1) or bare (V3.1)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slime.agent.parsing.plain import Read

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED = re.compile(r"^\s*([^\n]+)\n```(?:json)?\n(.*?)\n?```\s*$", re.DOTALL)


def parse_deepseek(text: str, schemas: Mapping[str, Any]) -> Read:
    before, begun, body = text.partition(_BEGIN)
    if not begun:
        return text, [], False
    body = body.partition(_END)[0]
    uses: list[dict[str, Any]] = []
    for kind, rest in _CALL.findall(body):
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
