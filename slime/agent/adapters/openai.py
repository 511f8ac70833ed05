"""OpenAI's Responses API: items instead of messages, and a stream of typed events."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from slime.agent.adapters.client_errors import ApiError, invalid
from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.dialect import (
    JSON_FORMATS,
    Call,
    Reply,
    arguments_of,
    constrained,
    content_of,
    function_tool,
    paired,
)
from slime.agent.adapters.openai_chat import SAMPLING, ChatCompletions, OpenAIDialect, sampling_of
from slime.agent.adapters.shapes import COUNT, FUNCTION, Kinds, check
from slime.agent.history import THOUGHTS
from slime.agent.trajectory import Message

_WORDS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_PARTS: dict[str, Any] = {"refusal": {"refusal": str}, **{word: {"text": str} for word in _WORDS}}
_TEXT = (str, [Kinds("type", _PARTS)])
_SHOWN = (str, [Kinds("type", {**_PARTS, "input_image": {"image_url": str}})])
_ROLES = {name: {"content": _TEXT} for name in ("assistant", "system", "developer")}
_ITEMS = {
    "message": Kinds("role", {**_ROLES, "user": {"content": _SHOWN}}),
    "reasoning": {"content?": _TEXT[1], "summary?": _TEXT[1]},
    "function_call": {"name": str, "call_id": str, "arguments": str},
    "function_call_output": {"call_id": str, "output": _SHOWN},
}
_REQUEST = {
    **SAMPLING,
    "model?": str,
    "input": (str, [Kinds("type", _ITEMS, default="message")]),
    "instructions?": str,
    "previous_response_id?": None,
    # Tools that the real endpoint would run itself are left out.
    "tools?": [Kinds("type", {"function": FUNCTION}, others=re.compile(".*", re.DOTALL))],
    "max_output_tokens?": COUNT,
    "text?": {"format?": Kinds("type", JSON_FORMATS)},
    "background?": bool,
    "conversation?": None,
    "prompt?": None,
}


class Responses(OpenAIDialect):
    path = "/v1/responses"

    def read(self, body: dict[str, Any]) -> Call:
        check(body, _REQUEST)
        if body.get("background"):
            raise invalid("'background' is not supported.", "background")
        words, given = body.get("instructions"), body.get("input")
        messages: list[Message] = [] if words is None else [{"role": "system", "content": words}]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        for place, item in enumerate(items or ()):
            _add_item(messages, item, f"input[{place}]")
        functions = [tool for tool in body.get("tools") or () if tool["type"] == "function"]
        call = Call(
            messages=paired(messages),
            tools=[function_tool(one, one.get("parameters")) for one in functions],
            sampling=sampling_of(body, ("max_output_tokens",)),
            stream=bool(body.get("stream")),
            model=body.get("model") or "policy",
            uses_tools=body.get("tool_choice") != "none",
        )
        return constrained(call, (body.get("text") or {}).get("format"), body.get("tool_choice"))

    def answer(self, reply: Reply) -> dict[str, Any]:
        return _response(reply.call, output=items_of(reply), reply=reply)

    def events(self, reply: Reply) -> bytes:
        begun = {"response": _response(reply.call, output=[])}
        events = [("response.created", begun), ("response.in_progress", begun)]
        items = items_of(reply)
        for index, item in enumerate(items):
            events += _item_events(index, item)
        done = "response.incomplete" if reply.made.finish == "length" else "response.completed"
        events.append((done, {"response": _response(reply.call, output=items, reply=reply)}))
        return b"".join(_event(number, kind, data) for number, (kind, data) in enumerate(events))

    def error_event(self, error: ApiError, call: Call) -> bytes:
        failed = {**_response(call, output=[]), "status": "failed"}
        failed["error"] = {"code": "server_error", "message": error.message}
        return _event(0, "response.failed", {"response": failed})


def _event(number: int, kind: str, data: dict[str, Any]) -> bytes:
    event = {"type": kind, "sequence_number": number, **data}
    return f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode()


def _add_item(messages: list[Message], item: dict[str, Any], where: str) -> None:
    match item.get("type") or "message":
        case "message" if item["role"] == "assistant":
            _answer(messages)["content"] += content_of(item["content"], where)
        case "message":
            role = "user" if item["role"] == "user" else "system"
            messages.append({"role": role, "content": content_of(item["content"], where)})
        case "reasoning":
            shown = item.get("content") if item.get("content") is not None else item.get("summary")
            _answer(messages)[THOUGHTS] = content_of(shown, where)
        case "function_call":
            function = {"name": item["name"], "arguments": arguments_of(item["arguments"])}
            calls = _answer(messages).setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        case "function_call_output":
            result = content_of(item["output"], where)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": result})


def _answer(messages: list[Message]) -> Message:
    """Return the assistant message that the items of one turn make up."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def items_of(reply: Reply) -> list[dict[str, Any]]:
    name, out = reply.call.response_id, []
    if reply.parsed.reasoning:
        summary = [{"type": "summary_text", "text": reply.parsed.reasoning}]
        out.append({"id": f"rs_{name}", "type": "reasoning", "summary": summary, "status": "completed"})
    if reply.parsed.text or not reply.tool_calls:
        out.append(_message_item(name, reply.parsed.text))
    for place, call in enumerate(reply.tool_calls):
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        item = {"id": f"fc_{name}{place}", "type": "function_call", "call_id": call["id"]}
        out.append({**item, "name": call["function"]["name"], "arguments": text, "status": "completed"})
    return out


def _message_item(name: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": "completed"}
    return {**item, "content": [part]}


def _response(call: Call, *, output: list[dict[str, Any]], reply: Reply | None = None) -> dict[str, Any]:
    """Return the response object; without a reply it is still in progress."""
    truncated = reply is not None and reply.made.finish == "length"
    return {
        "id": f"resp_{call.response_id}",
        "previous_response_id": None,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if reply is None else "incomplete" if truncated else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "instructions": None,
        "model": call.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": call.sampling.get("temperature"),
        "top_p": call.sampling.get("top_p"),
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "usage": _usage(reply) if reply is not None else None,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_prompt,
        "input_tokens_details": {"cached_tokens": int(reply.made.meta.get("cached_tokens") or 0)},
        "output_tokens": len(reply.made.ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt + len(reply.made.ids),
    }


def _item_events(index: int, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of one item: it opens empty, is filled by one delta, and closes."""
    begun, where = {**item, "status": "in_progress"}, {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        begun["arguments"], text = "", item["arguments"]
        name = "function_call_arguments"
        middle = [
            (f"{name}.delta", {**where, "delta": text}),
            (f"{name}.done", {**where, "name": item["name"], "arguments": text}),
        ]
    else:
        field, part_name, name, place, more = _TEXT_EVENTS[item["type"]]
        part, begun[field] = item[field][0], []
        text, where = part["text"], {**where, place: 0}
        middle = [
            (f"{part_name}.added", {**where, "part": {**part, "text": ""}}),
            (f"{name}.delta", {**where, "delta": text, **more}),
            (f"{name}.done", {**where, "text": text, **more}),
            (f"{part_name}.done", {**where, "part": part}),
        ]
    return [
        ("response.output_item.added", {"output_index": index, "item": begun}),
        *((f"response.{kind}", data) for kind, data in middle),
        ("response.output_item.done", {"output_index": index, "item": item}),
    ]


# Of items with text: the field with its part, names of the events of part and text, their index, more fields.
_TEXT_EVENTS: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "message": ("content", "content_part", "output_text", "content_index", {"logprobs": []}),
    "reasoning": ("summary", "reasoning_summary_part", "reasoning_summary_text", "summary_index", {}),
}


class OpenAIAdapter(BaseAdapter):
    """Serves OpenAI's APIs. The base url for clients is `http://HOST:PORT/v1`, the key the session's id."""

    protocols = (ChatCompletions(), Responses())
