"""OpenAI's chat completions: reads requests, writes responses and streams."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from slime.agent.adapters.client_errors import ApiError, check_stops, count, invalid, maybe, number, want
from slime.agent.adapters.dialect import (
    Call,
    ClientDialect,
    Reply,
    Stream,
    arguments_of,
    content_parts,
    function_tool,
    paired,
)
from slime.agent.engine_access import Made
from slime.agent.history import THOUGHTS, Message
from slime.wire.openai_shapes import error_json, log_prob_entries

_ROLES = ("developer", "system", "user", "assistant", "tool")
_ERROR_TYPES = {
    "budget": ("insufficient_quota", "insufficient_quota"),
    "auth": ("invalid_request_error", "invalid_api_key"),
    "context": ("invalid_request_error", "context_length_exceeded"),
    "engine": ("server_error", None),
    "ours": ("server_error", None),
    "closed": ("server_error", "session_closed"),
    "unknown_answer": ("invalid_request_error", "previous_response_not_found"),
}


def openai_error(error: ApiError) -> dict[str, Any]:
    kind, code = _ERROR_TYPES.get(error.kind, ("invalid_request_error", None))
    return error_json(error.message, kind, param=error.param, code=code)


def sampling_of(body: Mapping[str, Any], limits: tuple[str, ...]) -> dict[str, Any]:
    """Return sampling parameters as engines name them; `limits`: names for the length of a response."""
    body = dict(body)
    stop = body.get("stop")
    stop = [stop] if isinstance(stop, str) else stop
    if stop is not None:
        check_stops(want(stop, list, "stop", "a string or a list of strings"), "stop")
    found = {
        "temperature": number(body, "temperature", 0, 2),
        "top_p": number(body, "top_p", 0, 1),
        "top_k": count(body, "top_k", -1),
        "min_p": number(body, "min_p", 0, 1),
        "frequency_penalty": number(body, "frequency_penalty", -2, 2),
        "presence_penalty": number(body, "presence_penalty", -2, 2),
        "sampling_seed": count(body, "seed", -(2**63), 2**63 - 1),
        "stop": stop or None,
        "max_new_tokens": min(filter(None, (count(body, name) for name in limits)), default=None),
    }
    return {name: value for name, value in found.items() if value is not None}


def refuse_what_is_not_done(body: dict[str, Any]) -> None:
    """Refuse options that cannot be honoured, instead of ignoring them silently."""
    if count(body, "n") not in (None, 1):
        raise invalid("'n' above 1 is not supported: send the request again for another response.", "n")
    style = maybe(body, "response_format", dict, "an object")
    if style is not None and style.get("type") != "text":
        raise invalid("'response_format' other than text is not supported.", "response_format")
    if maybe(body, "logit_bias", dict, "an object"):
        raise invalid("'logit_bias' is not supported.", "logit_bias")
    if any(kind != "text" for kind in maybe(body, "modalities", list, "an array") or ()):
        raise invalid("'modalities' other than text are not supported.", "modalities")
    for name in ("functions", "function_call"):
        if body.get(name) is not None:
            raise invalid(f"'{name}' is not supported: send 'tools'.", name)
    for name in ("audio", "web_search_options"):
        if body.get(name) is not None:
            raise invalid(f"'{name}' is not supported.", name)


def tool_choice_of(body: Mapping[str, Any]) -> bool:
    """Return whether tools may be called; a forced call is refused."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise invalid("'tool_choice' must be auto or none: a call cannot be forced here.", "tool_choice")
    return choice != "none"


class OpenAIDialect(ClientDialect):
    """What both of OpenAI's APIs have in common."""

    def key_in(self, body: Mapping[str, Any]) -> str | None:
        metadata = body.get("metadata")
        session = metadata.get("session_id") if isinstance(metadata, dict) else None
        key = session or body.get("user")
        return key if isinstance(key, str) else None

    def error(self, error: ApiError) -> dict[str, Any]:
        return openai_error(error)


class ChatCompletions(OpenAIDialect):
    path = "/v1/chat/completions"

    def read(self, body: dict[str, Any]) -> Call:
        refuse_what_is_not_done(body)
        given = want(body.get("messages"), list, "messages", "an array of objects")
        if count(body, "top_logprobs", 0):
            raise invalid("'top_logprobs' above 0 is not supported.", "top_logprobs")
        options = maybe(body, "stream_options", dict, "an object") or {}
        return Call(
            messages=paired([_message(one, f"messages[{place}]") for place, one in enumerate(given)]),
            tools=_tools(body.get("tools")),
            sampling=sampling_of(body, ("max_tokens", "max_completion_tokens")),
            stream=bool(maybe(body, "stream", bool, "a boolean")),
            model=want(body.get("model"), str, "model", "a string"),
            logprobs=bool(maybe(body, "logprobs", bool, "a boolean")),
            include_usage=bool(maybe(options, "include_usage", bool, "a boolean")),
            uses_tools=tool_choice_of(body),
        )

    def answer(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.parsed.text or (None if reply.tool_calls else ""),
            "refusal": None,
        }
        if reply.parsed.reasoning:
            message[THOUGHTS] = reply.parsed.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [_as_json_text(call) for call in reply.tool_calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": log_probs_of(reply.session.renderer.tokenizer, reply.made, reply.call.logprobs),
            "finish_reason": finish_of(reply),
        }
        return {
            "id": f"chatcmpl-{reply.call.response_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": reply.call.model,
            "choices": [choice],
            "usage": usage_of(reply),
        }

    def stream(self, call: Call) -> Stream:
        return _ChatStream(call)


class _ChatStream(Stream):
    def __init__(self, call: Call) -> None:
        self._call = call
        self._created = int(time.time())

    def _chunk(self, delta: dict[str, Any], **choice: Any) -> bytes:
        return self._event([{"index": 0, "delta": delta, "finish_reason": None, **choice}])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {
            "id": f"chatcmpl-{self._call.response_id}",
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._call.model,
            "choices": choices,
            **more,
        }
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def start(self, num_prompt: int) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, kind: str, text: str, new: Made | None) -> bytes:
        told = new is not None and self._call.logprobs and new.ids
        if not text and not told:
            return b""
        delta = {"content" if kind == "text" else THOUGHTS: text}
        return self._chunk(
            delta, **({"logprobs": {"content": _entries(self._call.tokenizer, new)}} if told and new else {})
        )

    def end(self, reply: Reply) -> bytes:
        out = b""
        for index, call in enumerate(reply.tool_calls):
            arguments = _as_json_text(call)["function"]["arguments"]
            head = {"name": call["function"]["name"], "arguments": ""}
            first = {"index": index, "id": call["id"], "type": "function", "function": head}
            out += self._chunk({"tool_calls": [first]})
            out += self._chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        out += self._chunk({}, finish_reason=finish_of(reply))
        if self._call.include_usage:
            out += self._event([], usage=usage_of(reply))
        return out + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + json.dumps(openai_error(error)).encode() + b"\n\n"


def finish_of(reply: Reply) -> str:
    if reply.tool_calls:
        return "tool_calls"
    return "length" if reply.made.finish == "length" else "stop"


def usage_of(reply: Reply) -> dict[str, Any]:
    made = reply.made
    return {
        "prompt_tokens": reply.num_prompt,
        "completion_tokens": len(made.ids),
        "total_tokens": reply.num_prompt + len(made.ids),
        "prompt_tokens_details": {"cached_tokens": int(made.meta.get("cached_tokens") or 0)},
    }


def log_probs_of(tokenizer: Any, made: Made, wanted: bool) -> dict[str, Any] | None:
    return {"content": _entries(tokenizer, made), "refusal": None} if wanted else None


def _entries(tokenizer: Any, made: Made) -> list[dict[str, Any]]:
    return log_prob_entries(tokenizer.decode, made.ids, made.log_probs)


def _as_json_text(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as this API writes it, with arguments as text."""
    function = {
        **call["function"],
        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
    }
    return {**call, "function": function}


def _tools(given: Any) -> list[dict[str, Any]]:
    out = []
    for place, tool in enumerate(want([] if given is None else given, list, "tools", "an array")):
        where = f"tools[{place}]"
        if want(tool, dict, where, "an object").get("type") != "function":
            raise invalid(
                f"Invalid value: {tool.get('type')!r}. Supported values are: 'function'.", f"{where}.type"
            )
        function = want(tool.get("function"), dict, f"{where}.function", "an object")
        out.append(
            function_tool(
                function.get("name"), function.get("description"), function.get("parameters"), where
            )
        )
    return out


def _message(given: Any, where: str) -> Message:
    role = want(given, dict, where, "an object").get("role")
    if role not in _ROLES:
        raise invalid(f"Invalid value: {role!r}. Supported values are: {', '.join(_ROLES)}.", f"{where}.role")
    content = given.get("content")
    if isinstance(content, list):
        pictures = {"image_url": _image_url} if role in ("user", "tool") else {}
        content = content_parts(content, f"{where}.content", ("text", "refusal"), pictures)
    elif role != "assistant" or content is not None:
        want(content, str, f"{where}.content", "a string or a list")
    message: Message = {"role": "system" if role == "developer" else role, "content": content}
    if role == "tool":
        message["tool_call_id"] = want(given.get("tool_call_id"), str, f"{where}.tool_call_id", "a string")
    if role == "assistant":
        _read_answer(message, given, where)
    return message


def _image_url(part: dict[str, Any], where: str) -> Any:
    return want(part.get("image_url"), dict, f"{where}.image_url", "an object").get("url")


def _read_answer(message: Message, given: dict[str, Any], where: str) -> None:
    message["content"] = message["content"] or ""
    thoughts = given.get(THOUGHTS, given.get("reasoning"))
    if isinstance(thoughts, str):
        message[THOUGHTS] = thoughts
    if given.get("function_call") is not None:
        raise invalid("'function_call' is not supported: send 'tool_calls'.", f"{where}.function_call")
    calls = given.get("tool_calls")
    if calls is not None and want(calls, list, f"{where}.tool_calls", "an array"):
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _call(given: Any, where: str) -> dict[str, Any]:
    if want(given, dict, where, "an object").get("type") != "function":
        raise invalid("Supported values are: 'function'.", f"{where}.type")
    function = want(given.get("function"), dict, f"{where}.function", "an object")
    name = want(function.get("name"), str, f"{where}.function.name", "a string")
    text = want(function.get("arguments"), str, f"{where}.function.arguments", "a string")
    identity = want(given.get("id"), str, f"{where}.id", "a string")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments_of(text)}}
