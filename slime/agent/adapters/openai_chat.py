"""OpenAI's chat completions: reads requests, writes responses and streams."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from slime.agent.adapters.client_errors import ApiError, invalid
from slime.agent.adapters.dialect import (
    JSON_FORMATS,
    NAMED,
    Call,
    ClientDialect,
    Reply,
    arguments_of,
    constrained,
    content_of,
    function_tool,
    paired,
)
from slime.agent.adapters.shapes import COUNT, FUNCTION, SOME_TEXT, Kinds, Number, check
from slime.agent.engine_access import Made
from slime.agent.history import THOUGHTS
from slime.agent.trajectory import Message
from slime.wire.openai_shapes import error_json, log_prob_entries

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
SAMPLING = {
    "temperature?": Number(0, 2, float),
    "top_p?": Number(0, 1, float),
    "top_k?": Number(-1),
    "min_p?": Number(0, 1, float),
    "frequency_penalty?": Number(-2, 2, float),
    "presence_penalty?": Number(-2, 2, float),
    "seed?": Number(-(2**63)),
    "stop?": (SOME_TEXT, [SOME_TEXT]),
    "stream?": bool,
    "top_logprobs?": Number(0, 0),
    "tool_choice?": (NAMED, {"auto", "none", "required"}),
}
_PARTS: dict[str, Any] = {"text": {"text": str}, "refusal": {"refusal": str}}
_TEXT = (str, [Kinds("type", _PARTS)])
_SHOWN = (str, [Kinds("type", {**_PARTS, "image_url": {"image_url": {"url": str}}})])
_CALL = {"id": str, "type": {"function"}, "function": {"name": str, "arguments": str}}
_MESSAGES = {
    "developer": {"content": _TEXT},
    "system": {"content": _TEXT},
    "user": {"content": _SHOWN},
    "assistant": {"content?": _TEXT, "tool_calls?": [_CALL], "function_call?": None},
    "tool": {"content": _SHOWN, "tool_call_id": str},
}
_REQUEST = {
    **SAMPLING,
    "model": str,
    "messages": [Kinds("role", _MESSAGES)],
    "tools?": [{"type": {"function"}, "function": FUNCTION}],
    "max_tokens?": COUNT,
    "max_completion_tokens?": COUNT,
    "logprobs?": bool,
    "stream_options?": {"include_usage?": bool},
    "n?": Number(1, 1),
    "tool_choice?": ({"type": {"function"}, "function": {"name": str}}, {"auto", "none", "required"}),
    "response_format?": Kinds("type", {**JSON_FORMATS, "json_schema": {"json_schema": {"schema": dict}}}),
    "logit_bias?": dict,
    "modalities?": [{"text"}],
    **dict.fromkeys(("functions?", "function_call?", "audio?", "web_search_options?")),
}
_ERROR_TYPES = {
    "budget": ("insufficient_quota", "insufficient_quota"),
    "auth": ("invalid_request_error", "invalid_api_key"),
    "context": ("invalid_request_error", "context_length_exceeded"),
    "engine": ("server_error", None),
    "ours": ("server_error", None),
    "closed": ("server_error", "session_closed"),
}


def sampling_of(body: Mapping[str, Any], limits: tuple[str, ...]) -> dict[str, Any]:
    """Return sampling parameters as engines name them; `limits`: names for the length of a response."""
    stop = body.get("stop")
    found = {name: body.get(name) for name in SAMPLING_NAMES} | {
        "sampling_seed": body.get("seed"),
        "stop": [stop] if isinstance(stop, str) else stop or None,
        "max_new_tokens": min((body[name] for name in limits if body.get(name) is not None), default=None),
    }
    return {name: value for name, value in found.items() if value is not None}


class OpenAIDialect(ClientDialect):
    """Base class of the dialects of OpenAI's two APIs (chat completions and responses)."""

    def error(self, error: ApiError) -> dict[str, Any]:
        kind, code = _ERROR_TYPES.get(error.kind, ("invalid_request_error", None))
        return error_json(error.message, kind, param=error.param, code=code)


class ChatCompletions(OpenAIDialect):
    path = "/v1/chat/completions"

    def read(self, body: dict[str, Any]) -> Call:
        check(body, _REQUEST)
        if body.get("logit_bias"):
            raise invalid("'logit_bias' is not supported.", "logit_bias")
        options = body.get("stream_options") or {}
        given = [_message(one, f"messages[{place}].content") for place, one in enumerate(body["messages"])]
        functions = [tool["function"] for tool in body.get("tools") or ()]
        call = Call(
            messages=paired(given),
            tools=[function_tool(one, one.get("parameters")) for one in functions],
            sampling=sampling_of(body, ("max_tokens", "max_completion_tokens")),
            stream=bool(body.get("stream")),
            model=body["model"],
            logprobs=bool(body.get("logprobs")),
            include_usage=bool(options.get("include_usage")),
            uses_tools=body.get("tool_choice") != "none",
        )
        return constrained(call, body.get("response_format"), body.get("tool_choice"))

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
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_of(reply)}
        if reply.call.logprobs:
            choice["logprobs"] = {"content": _entries(reply.call, reply.made), "refusal": None}
        return {
            "id": f"chatcmpl-{reply.call.response_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": reply.call.model,
            "choices": [choice],
            "usage": usage_of(reply),
        }

    def events(self, reply: Reply) -> bytes:
        call, parsed = reply.call, reply.parsed
        head = {
            "id": f"chatcmpl-{call.response_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": call.model,
        }
        logprobs = {"logprobs": {"content": _entries(call, reply.made)}} if call.logprobs else {}
        choices: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": ""}}]
        if parsed.reasoning:
            choices.append({"delta": {THOUGHTS: parsed.reasoning}})
        if parsed.text or logprobs:
            choices.append({"delta": {"content": parsed.text}, **logprobs})
        for index, tool_call in enumerate(reply.tool_calls):
            choices.append({"delta": {"tool_calls": [{"index": index, **_as_json_text(tool_call)}]}})
        choices.append({"delta": {}, "finish_reason": finish_of(reply)})
        chunks = [{**head, "choices": [{"index": 0, "finish_reason": None, **one}]} for one in choices]
        if call.include_usage:
            chunks.append({**head, "choices": [], "usage": usage_of(reply)})
        return b"".join(map(_event, chunks)) + b"data: [DONE]\n\n"

    def error_event(self, error: ApiError, call: Call) -> bytes:
        return _event(self.error(error))


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def finish_of(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls else "length" if reply.made.finish == "length" else "stop"


def usage_of(reply: Reply) -> dict[str, Any]:
    made = reply.made
    return {
        "prompt_tokens": reply.num_prompt,
        "completion_tokens": len(made.ids),
        "total_tokens": reply.num_prompt + len(made.ids),
        "prompt_tokens_details": {"cached_tokens": int(made.meta.get("cached_tokens") or 0)},
    }


def _entries(call: Call, made: Made) -> list[dict[str, Any]]:
    return log_prob_entries(call.tokenizer.decode, made.ids, made.log_probs)


def _as_json_text(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as this API writes it, with arguments as text."""
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _message(given: dict[str, Any], where: str) -> Message:
    role = given["role"]
    message: Message = {"role": "system" if role == "developer" else role}
    message["content"] = content_of(given.get("content"), where)
    if role == "tool":
        message["tool_call_id"] = given["tool_call_id"]
    if role == "assistant":
        thoughts = given.get(THOUGHTS, given.get("reasoning"))
        if isinstance(thoughts, str):
            message[THOUGHTS] = thoughts
        if given.get("tool_calls"):
            message["tool_calls"] = [_call(call) for call in given["tool_calls"]]
    return message


def _call(given: dict[str, Any]) -> dict[str, Any]:
    name, text = given["function"]["name"], given["function"]["arguments"]
    function = {"name": name, "arguments": arguments_of(text)}
    return {"id": given["id"], "type": "function", "function": function}
