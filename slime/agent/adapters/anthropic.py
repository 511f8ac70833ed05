"""Anthropic's messages API: reads requests, writes responses and streams, counts tokens."""

from __future__ import annotations

import json
import re
from typing import Any

from slime.agent.adapters.client_errors import ApiError
from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.dialect import (
    JSON_FORMATS,
    NAMED,
    Call,
    ClientDialect,
    Reply,
    constrained,
    content_of,
    folded,
    function_tool,
    paired,
)
from slime.agent.adapters.shapes import COUNT, FUNCTION, SOME_TEXT, Kinds, Number, check
from slime.agent.history import THOUGHTS
from slime.agent.trajectory import Message

_ERROR_TYPES = {
    "auth": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "budget": "rate_limit_error",
    "closed": "overloaded_error",
    "engine": "api_error",
    "ours": "api_error",
}
_TOOL = {**FUNCTION, "input_schema": dict}
_SERVER_TOOL = re.compile(r".*_20\d{6}")  # the types of tools that the real endpoint runs end with a date
_SOURCES = {
    "base64": {"media_type": {"image/jpeg", "image/png", "image/gif", "image/webp"}, "data": str},
    "url": {"url": str},
}
_TEXT_BLOCK: dict[str, Any] = {"text": {"text": str}}
_TEXT = (str, [Kinds("type", _TEXT_BLOCK)])
_SHOWN_BLOCKS: dict[str, Any] = {**_TEXT_BLOCK, "image": {"source": Kinds("type", _SOURCES)}}
_RESULT = {"tool_use_id": str, "content?": (str, [Kinds("type", _SHOWN_BLOCKS)])}
_ANSWER_BLOCKS = {
    **_TEXT_BLOCK,
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "tool_use": {"id": str, "name": str, "input": dict},
}
_MESSAGES = {
    "user": {"content": (str, [Kinds("type", {**_SHOWN_BLOCKS, "tool_result": _RESULT})])},
    "assistant": {"content": (str, [Kinds("type", _ANSWER_BLOCKS)])},
    "system": {"content": _TEXT},
}
_REQUEST = {
    "model": str,
    "max_tokens": COUNT,
    "messages": [Kinds("role", _MESSAGES)],
    "system?": _TEXT,
    "tools?": [Kinds("type", {"custom": _TOOL}, default="custom", others=_SERVER_TOOL)],
    "tool_choice?": Kinds("type", {"auto": {}, "none": {}, "any": {}, "tool": NAMED}),
    "temperature?": Number(0, 1, float),
    "top_p?": Number(0, 1, float),
    "top_k?": COUNT,
    "stop_sequences?": [SOME_TEXT],
    "stream?": bool,
    "output_config?": {"format?": Kinds("type", JSON_FORMATS)},
}
_STOP_REASONS = {"length": "max_tokens"}


class Messages(ClientDialect):
    path = "/v1/messages"

    def read(self, body: dict[str, Any]) -> Call:
        check(body, _REQUEST)
        messages: list[Message] = []
        if words := content_of(body.get("system"), "system"):
            messages.append({"role": "system", "content": words})
        for place, message in enumerate(body["messages"]):
            messages += _read_message(message, f"messages.{place}.content")
        tools = [tool for tool in body.get("tools") or () if tool.get("type") in (None, "custom")]
        found = {name: body.get(name) for name in ("temperature", "top_p", "top_k")}
        found |= {"stop": body.get("stop_sequences") or None, "max_new_tokens": body["max_tokens"]}
        call = Call(
            messages=paired(folded(messages)),
            tools=[function_tool(tool, tool["input_schema"]) for tool in tools],
            sampling={name: value for name, value in found.items() if value is not None},
            stream=bool(body.get("stream")),
            model=body["model"],
            uses_tools=(body.get("tool_choice") or {}).get("type") != "none",
        )
        return constrained(call, (body.get("output_config") or {}).get("format"), body.get("tool_choice"))

    def answer(self, reply: Reply) -> dict[str, Any]:
        return {
            "id": f"msg_{reply.call.response_id}",
            "type": "message",
            "role": "assistant",
            "model": reply.call.model,
            "content": blocks_of(reply),
            **_ending(reply),
            "usage": {"input_tokens": reply.num_prompt, "output_tokens": len(reply.made.ids)},
        }

    def events(self, reply: Reply) -> bytes:
        usage = {"input_tokens": reply.num_prompt, "output_tokens": 0}
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        out = _event("message_start", message={**self.answer(reply), **begun})
        for index, block in enumerate(blocks_of(reply)):
            empty, deltas = _opened(block)
            out += _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                out += _event("content_block_delta", index=index, delta=delta)
            out += _event("content_block_stop", index=index)
        written = {"output_tokens": len(reply.made.ids)}
        return out + _event("message_delta", delta=_ending(reply), usage=written) + _event("message_stop")

    def error_event(self, error: ApiError, call: Call) -> bytes:
        return _event("error", error=_error(error))

    def error(self, error: ApiError) -> dict[str, Any]:
        return {"type": "error", "error": _error(error)}

    def count(self, num_tokens: int) -> dict[str, Any] | None:
        return {"input_tokens": num_tokens}


def _error(error: ApiError) -> dict[str, str]:
    return {"type": _ERROR_TYPES.get(error.kind, "invalid_request_error"), "message": error.message}


def _read_message(given: dict[str, Any], where: str) -> list[Message]:
    """Return a message in the form of chat templates, after the tool results that it holds."""
    role, content = given["role"], given["content"]
    if role == "assistant":
        return [_answer([{"type": "text", "text": content}] if isinstance(content, str) else content)]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    rest = [block for block in content if block["type"] != "tool_result"]
    out: list[Message] = [
        {"role": "tool", "tool_call_id": one["tool_use_id"], "content": content_of(one.get("content"), where)}
        for one in content
        if one["type"] == "tool_result"
    ]
    if rest or role == "system":
        out.append({"role": role, "content": content_of(rest, where)})
    return out


def _answer(blocks: list[dict[str, Any]]) -> Message:
    """Read a response that the client sends back. This API sends thoughts too, so none means none."""
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    message: Message = {"role": "assistant", "content": "\n".join(texts), THOUGHTS: "\n".join(thoughts)}
    for block in blocks:
        if block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            call = {"id": block["id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return message


def blocks_of(reply: Reply) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if reply.parsed.reasoning:
        out.append({"type": "thinking", "thinking": reply.parsed.reasoning, "signature": ""})
    if reply.parsed.text:
        out.append({"type": "text", "text": reply.parsed.text})
    for call in reply.tool_calls:
        function = call["function"]
        out.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
        )
    return out


def _ending(reply: Reply) -> dict[str, Any]:
    if reply.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reply.made.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.made.stop_text}
    return {"stop_reason": _STOP_REASONS.get(reply.made.finish or "", "end_turn"), "stop_sequence": None}


def _event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


def _opened(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the empty block with which a block's events start, and the deltas that fill it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signature = {"type": "signature_delta", "signature": ""}
        return {**block, "thinking": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            signature,
        ]
    text = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


class AnthropicAdapter(BaseAdapter):
    """Serves Anthropic's API. The base url for clients is `http://HOST:PORT`, the key is the session's id."""

    protocols = (Messages(),)
