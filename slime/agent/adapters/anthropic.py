"""Anthropic's messages API: reads requests, writes responses and streams, counts tokens."""

from __future__ import annotations

import json
import re
from typing import Any

from slime.agent.adapters.client_errors import ApiError, check_stops, count, invalid, maybe, number, want
from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.dialect import (
    Call,
    ClientDialect,
    Reply,
    Stream,
    content_parts,
    folded,
    function_tool,
    paired,
    text_parts,
)
from slime.agent.engine_access import Made
from slime.agent.history import THOUGHTS, Message

_ERROR_TYPES = {
    "auth": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "budget": "rate_limit_error",
    "closed": "overloaded_error",
    "engine": "api_error",
    "ours": "api_error",
}
_SERVER_TOOL = re.compile(r"_20\d{6}$")  # the types of tools that the real endpoint runs end with a date
_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_STOP_REASONS = {"length": "max_tokens"}


class Messages(ClientDialect):
    path = "/v1/messages"

    def read(self, body: dict[str, Any]) -> Call:
        given = want(body.get("messages"), list, "messages", "a list")
        if count(body, "max_tokens") is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        system = body.get("system")
        if (maybe(body, "output_config", dict, "an object") or {}).get("format") is not None:
            raise invalid("output_config.format: other formats than text are not supported")
        messages: list[Message] = []
        if system is not None and (words := _text(system, "system")):
            messages.append({"role": "system", "content": words})
        for place, message in enumerate(given):
            _add_message(messages, message, f"messages.{place}")
        choice = maybe(body, "tool_choice", dict, "an object")
        if choice is not None and choice.get("type") not in ("auto", "none"):
            raise invalid("tool_choice: only auto and none are supported: a call cannot be forced here")
        return Call(
            messages=paired(folded(messages)),
            tools=_tools(body.get("tools")),
            sampling=_sampling(body),
            stream=bool(maybe(body, "stream", bool, "a boolean")),
            model=want(body.get("model"), str, "model", "a string"),
            uses_tools=choice is None or choice["type"] != "none",
        )

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

    def stream(self, call: Call) -> Stream:
        return _MessageStream(call)

    def error(self, error: ApiError) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(error.kind, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}

    def count(self, num_tokens: int) -> dict[str, Any] | None:
        return {"input_tokens": num_tokens}


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    stops = maybe(body, "stop_sequences", list, "a list") or []
    check_stops(stops, "stop_sequences")
    found = {
        "temperature": number(body, "temperature", 0, 1),
        "top_p": number(body, "top_p", 0, 1),
        "top_k": count(body, "top_k"),
        "stop": stops or None,
        "max_new_tokens": count(body, "max_tokens"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _tools(given: Any) -> list[dict[str, Any]]:
    """Return the client's tools, without the ones that the real endpoint would run itself."""
    out = []
    for place, tool in enumerate(want([] if given is None else given, list, "tools", "a list")):
        where = f"tools.{place}"
        kind = want(tool, dict, where, "an object").get("type")
        if kind not in (None, "custom") and not _SERVER_TOOL.search(str(kind)):
            raise invalid(f"{where}.type: {kind!r} is no type of a tool")
        if kind in (None, "custom"):
            schema = want(tool.get("input_schema"), dict, f"{where}.input_schema", "an object")
            out.append(function_tool(tool.get("name"), tool.get("description"), schema, where))
    return out


def _text(content: Any, where: str) -> str:
    return content if isinstance(content, str) else text_parts(content, where, ("text",))


def _shown(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return text, or parts if there are images."""
    return (
        content if isinstance(content, str) else content_parts(content, where, ("text",), {"image": _source})
    )


def _source(block: dict[str, Any], where: str) -> str:
    """Return the image of a block, as a data URL or the address that it gives."""
    source = want(block.get("source"), dict, f"{where}.source", "an object")
    kind = source.get("type")
    if kind == "url":
        return str(want(source.get("url"), str, f"{where}.source.url", "a string"))
    if kind != "base64":
        raise invalid(f"{where}.source.type: Input should be 'base64' or 'url'")
    media = want(source.get("media_type"), str, f"{where}.source.media_type", "a string")
    if media not in _MEDIA_TYPES:
        raise invalid(f"{where}.source.media_type: Input should be one of {', '.join(_MEDIA_TYPES)}")
    return f"data:{media};base64,{want(source.get('data'), str, f'{where}.source.data', 'a string')}"


def _add_message(messages: list[Message], given: Any, where: str) -> None:
    role = want(given, dict, where, "an object").get("role")
    content = given.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role: Input should be 'user' or 'assistant'")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        if role == "assistant":
            messages[-1][THOUGHTS] = ""
        return
    blocks = want(content, list, f"{where}.content", "a string or a list")
    for place, block in enumerate(blocks):
        want(block, dict, f"{where}.content.{place}", "an object")
    if role == "assistant":
        messages.append(_answer(blocks, where))
    elif role == "system":
        messages.append({"role": "system", "content": _text(blocks, f"{where}.content")})
    else:
        _add_user_blocks(messages, blocks, where)


def _add_user_blocks(messages: list[Message], blocks: list[dict[str, Any]], where: str) -> None:
    texts: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        name = f"{where}.content.{place}"
        identity = want(block.get("tool_use_id"), str, f"{name}.tool_use_id", "a string")
        content = block.get("content")
        result = _shown("" if content is None else content, f"{name}.content")
        messages.append({"role": "tool", "tool_call_id": identity, "content": result})
    if texts:
        messages.append({"role": "user", "content": _shown(texts, f"{where}.content")})


def _answer(blocks: list[dict[str, Any]], where: str) -> Message:
    """Read a response that the client sends back. This API sends thoughts too, so none means none."""
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        name, kind = f"{where}.content.{place}", block.get("type")
        if kind == "text":
            texts.append(want(block.get("text"), str, f"{name}.text", "a string"))
        elif kind == "thinking":
            thoughts.append(want(block.get("thinking"), str, f"{name}.thinking", "a string"))
        elif kind == "tool_use":
            identity = want(block.get("id"), str, f"{name}.id", "a string")
            function = {
                "name": want(block.get("name"), str, f"{name}.name", "a string"),
                "arguments": want(block.get("input"), dict, f"{name}.input", "an object"),
            }
            calls.append({"id": identity, "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise invalid(f"{name}: blocks of type {kind!r} are not supported in assistant messages")
    message: Message = {"role": "assistant", "content": "\n".join(texts), THOUGHTS: "\n".join(thoughts)}
    if calls:
        message["tool_calls"] = calls
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


class _MessageStream(Stream):
    """Writes events with one open block at a time; another kind of text closes it."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._index = -1
        self._kind: str | None = None

    def _event(self, kind: str, **data: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()

    def start(self, num_prompt: int) -> bytes:
        message: dict[str, Any] = {
            "id": f"msg_{self._call.response_id}",
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_prompt, "output_tokens": 0},
        }
        return self._event("message_start", message=message)

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._index += 1
        self._kind = kind
        return closed + self._event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        out = b""
        if self._kind == "thought":
            out = self._delta({"type": "signature_delta", "signature": ""})
        self._kind = None
        return out + self._event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=self._index, delta=delta)

    def piece(self, kind: str, text: str, new: Made | None) -> bytes:
        if not text:
            return b""
        out = b""
        if self._kind != kind:
            empty = {"type": "text", "text": ""}
            block = empty if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}
            out = self._open(kind, block)
        if kind == "text":
            return out + self._delta({"type": "text_delta", "text": text})
        return out + self._delta({"type": "thinking_delta", "thinking": text})

    def end(self, reply: Reply) -> bytes:
        out = b""
        for call in reply.tool_calls:
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            out += self._open("call", block)
            text = json.dumps(function["arguments"], ensure_ascii=False)
            out += self._delta({"type": "input_json_delta", "partial_json": text})
        out += self._close()
        usage = {"output_tokens": len(reply.made.ids)}
        out += self._event("message_delta", delta=_ending(reply), usage=usage)
        return out + self._event("message_stop")

    def error(self, error: ApiError) -> bytes:
        kind = _ERROR_TYPES.get(error.kind, "invalid_request_error")
        return self._event("error", error={"type": kind, "message": error.message})


class AnthropicAdapter(BaseAdapter):
    """Serves Anthropic's API. The base url for clients is `http://HOST:PORT`, the key is the session's id."""

    protocols = (Messages(),)
