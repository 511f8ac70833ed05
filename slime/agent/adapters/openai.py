"""OpenAI's Responses API: items instead of messages, and a stream of typed events."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from slime.agent.adapters.client_errors import ApiError, invalid
from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.dialect import (
    Call,
    Reply,
    Stream,
    arguments_of,
    content_of,
    function_tool,
    paired,
)
from slime.agent.adapters.openai_chat import SAMPLING, ChatCompletions, OpenAIDialect, sampling_of
from slime.agent.adapters.shapes import COUNT, FUNCTION, Kinds, check
from slime.agent.engine_access import Made
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
    "previous_response_id?": str,
    # Tools that the real endpoint would run itself are left out.
    "tools?": [Kinds("type", {"function": FUNCTION}, others=re.compile(".*", re.DOTALL))],
    "max_output_tokens?": COUNT,
    "text?": {"format?": {"type": {"text"}}},
    "background?": bool,
    "conversation?": None,
    "prompt?": None,
}
_ID = "resp_"


class Responses(OpenAIDialect):
    path = "/v1/responses"

    def read(self, body: dict[str, Any]) -> Call:
        check(body, _REQUEST)
        if body.get("background"):
            raise invalid("'background' is not supported.", "background")
        words, given, after = (body.get(name) for name in ("instructions", "input", "previous_response_id"))
        messages: list[Message] = [] if words is None else [{"role": "system", "content": words}]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        for place, item in enumerate(items or ()):
            _add_item(messages, item, f"input[{place}]")
        functions = [tool for tool in body.get("tools") or () if tool["type"] == "function"]
        return Call(
            messages=paired(messages) if after is None else messages,
            tools=[function_tool(one, one.get("parameters")) for one in functions],
            sampling=sampling_of(body, ("max_output_tokens",)),
            stream=bool(body.get("stream")),
            model=body.get("model") or "policy",
            uses_tools=body.get("tool_choice") != "none",
            has_instructions=words is not None,
            keeps=True,
            after=after.removeprefix(_ID) if after is not None else None,
        )

    def answer(self, reply: Reply) -> dict[str, Any]:
        return _response(reply.call, output=items_of(reply), reply=reply)

    def stream(self, call: Call) -> Stream:
        return _ResponseStream(call)


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
    cut = reply is not None and reply.made.finish == "length"
    return {
        "id": f"{_ID}{call.response_id}",
        "previous_response_id": f"{_ID}{call.after}" if call.after is not None else None,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if reply is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
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


class _ResponseStream(Stream):
    """Writes thoughts and text as items that open with their first piece and close at the end."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._number = 0
        self._open: list[str] = []  # kinds of items that were opened, in order

    def _event(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode()

    def start(self, num_prompt: int) -> bytes:
        made = _response(self._call, output=[])
        return self._event("response.created", response=made) + self._event(
            "response.in_progress", response=made
        )

    def _text_event(self, kind: str, index: int, step: str, **more: Any) -> bytes:
        """Write an event of the text of an item, or, with `part`, of the part that holds it."""
        name, prefix, slot = "content_part", "msg_", "content_index"
        if kind != "text":
            name, prefix, slot = "reasoning_summary_part", "rs_", "summary_index"
        if "part" not in more:
            name = "output_text" if kind == "text" else "reasoning_summary_text"
            more |= {"logprobs": []} if kind == "text" else {}
        place = {"item_id": f"{prefix}{self._call.response_id}", "output_index": index, slot: 0}
        return self._event(f"response.{name}.{step}", **place, **more)

    def piece(self, kind: str, text: str, new: Made | None) -> bytes:
        if not text:
            return b""
        out = b"" if kind in self._open else self._begin(kind)
        return out + self._text_event(kind, self._open.index(kind), "delta", delta=text)

    def _begin(self, kind: str) -> bytes:
        index, name = len(self._open), self._call.response_id
        self._open.append(kind)
        if kind == "text":
            item = {**_message_item(name, ""), "status": "in_progress", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": f"rs_{name}", "type": "reasoning", "summary": [], "status": "in_progress"}
            part = {"type": "summary_text", "text": ""}
        added = self._event("response.output_item.added", output_index=index, item=item)
        return added + self._text_event(kind, index, "added", part=part)

    def end(self, reply: Reply) -> bytes:
        items = items_of(reply)
        out = b""
        for index, item in enumerate(items):
            if item["type"] == "function_call":
                out += self._whole_call(index, item)
                continue
            kind = "text" if item["type"] == "message" else "thought"
            if kind not in self._open:
                out += self._begin(kind)
            out += self._finish(index, kind, item)
        done = "response.incomplete" if reply.made.finish == "length" else "response.completed"
        return out + self._event(done, response=_response(self._call, output=items, reply=reply))

    def _finish(self, index: int, kind: str, item: dict[str, Any]) -> bytes:
        part = item["content" if kind == "text" else "summary"][0]
        out = self._text_event(kind, index, "done", text=part["text"])
        out += self._text_event(kind, index, "done", part=part)
        return out + self._event("response.output_item.done", output_index=index, item=item)

    def _whole_call(self, index: int, item: dict[str, Any]) -> bytes:
        begun = {**item, "arguments": "", "status": "in_progress"}
        where = {"item_id": item["id"], "output_index": index}
        out = self._event("response.output_item.added", output_index=index, item=begun)
        out += self._event("response.function_call_arguments.delta", **where, delta=item["arguments"])
        out += self._event(
            "response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
        )
        return out + self._event("response.output_item.done", output_index=index, item=item)

    def error(self, error: ApiError) -> bytes:
        failed = {**_response(self._call, output=[]), "status": "failed"}
        failed["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=failed)


class OpenAIAdapter(BaseAdapter):
    """Serves OpenAI's APIs. The base url for clients is `http://HOST:PORT/v1`, the key the session's id."""

    protocols = (ChatCompletions(), Responses())
