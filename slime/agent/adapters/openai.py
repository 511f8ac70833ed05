"""OpenAI's Responses API: items instead of messages, and a stream of typed events."""

from __future__ import annotations

import json
import time
from typing import Any

from slime.agent.adapters.client_errors import ApiError, count, invalid, maybe, want
from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.dialect import (
    Call,
    Reply,
    Stream,
    arguments_of,
    content_parts,
    function_tool,
    paired,
    text_parts,
)
from slime.agent.adapters.openai_chat import ChatCompletions, OpenAIDialect, sampling_of, tool_choice_of
from slime.agent.engine_access import Made
from slime.agent.history import THOUGHTS, Message

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_ROLES = ("user", "assistant", "system", "developer")
_ID = "resp_"


class Responses(OpenAIDialect):
    path = "/v1/responses"

    def read(self, body: dict[str, Any]) -> Call:
        _refuse_what_is_not_done(body)
        words, given = body.get("instructions"), body.get("input")
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        items = want(given, list, "input", "a string or an array")
        after = maybe(body, "previous_response_id", str, "a string")
        messages: list[Message] = []
        if words is not None:
            told = want(words, str, "instructions", "a string")
            messages.append({"role": "system", "content": told})
        for place, item in enumerate(items):
            _add_item(messages, item, f"input[{place}]")
        return Call(
            messages=paired(messages) if after is None else messages,
            tools=_tools(body.get("tools")),
            sampling=sampling_of(body, ("max_output_tokens",)),
            stream=bool(maybe(body, "stream", bool, "a boolean")),
            model=maybe(body, "model", str, "a string") or "policy",
            uses_tools=tool_choice_of(body),
            has_instructions=words is not None,
            keeps=True,
            after=after.removeprefix(_ID) if after is not None else None,
        )

    def answer(self, reply: Reply) -> dict[str, Any]:
        return _response(reply.call, output=items_of(reply), reply=reply)

    def stream(self, call: Call) -> Stream:
        return _ResponseStream(call)


def _refuse_what_is_not_done(body: dict[str, Any]) -> None:
    for name in ("conversation", "prompt"):
        if body.get(name) is not None:
            raise invalid(f"'{name}' is not supported: send the whole input.", name)
    if maybe(body, "background", bool, "a boolean"):
        raise invalid("'background' is not supported.", "background")
    if count(body, "top_logprobs", 0):
        raise invalid("'top_logprobs' above 0 is not supported.", "top_logprobs")
    text = maybe(body, "text", dict, "an object") or {}
    style = text.get("format")
    if style is not None and want(style, dict, "text.format", "an object").get("type") != "text":
        raise invalid("'text.format' other than text is not supported.", "text.format")


def _tools(given: Any) -> list[dict[str, Any]]:
    """Return the functions; tools that the real endpoint would run itself are left out."""
    out = []
    for place, tool in enumerate(want([] if given is None else given, list, "tools", "an array")):
        where = f"tools[{place}]"
        kind = want(tool, dict, where, "an object").get("type")
        if want(kind, str, f"{where}.type", "a string") == "function":
            out.append(
                function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), where)
            )
    return out


def _add_item(messages: list[Message], item: Any, where: str) -> None:
    kind = want(item, dict, where, "an object").get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise invalid(
                f"Invalid value: {role!r}. Supported values are: {', '.join(_ROLES)}.", f"{where}.role"
            )
        place = f"{where}.content"
        if role == "assistant":
            answer = _answer(messages)
            answer["content"] += _text(item.get("content"), place)
        elif role == "user":
            messages.append({"role": "user", "content": _shown(item.get("content"), place)})
        else:
            messages.append({"role": "system", "content": _text(item.get("content"), place)})
    elif kind == "reasoning":
        parts: Any = next((item[name] for name in ("content", "summary") if item.get(name) is not None), [])
        _answer(messages)[THOUGHTS] = text_parts(parts, f"{where}.summary", _TEXT_PARTS)
    elif kind == "function_call":
        name = want(item.get("name"), str, f"{where}.name", "a string")
        identity = want(item.get("call_id"), str, f"{where}.call_id", "a string")
        text = want(item.get("arguments"), str, f"{where}.arguments", "a string")
        function = {"name": name, "arguments": arguments_of(text)}
        calls = _answer(messages).setdefault("tool_calls", [])
        calls.append({"id": identity, "type": "function", "function": function})
    elif kind == "function_call_output":
        identity = want(item.get("call_id"), str, f"{where}.call_id", "a string")
        result = _shown(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": identity, "content": result})
    else:
        raise invalid(f"Items of type {kind!r} are not supported.", f"{where}.type")


def _shown(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return text, or parts if there are images."""
    if isinstance(content, str):
        return content
    return content_parts(content, where, _TEXT_PARTS, {"input_image": lambda part, _: part.get("image_url")})


def _text(content: Any, where: str) -> str:
    return content if isinstance(content, str) else text_parts(content, where, _TEXT_PARTS)


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
        out.append(
            {
                "id": f"fc_{name}{place}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": text,
                "status": "completed",
            }
        )
    return out


def _message_item(name: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


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

    def _place(self, kind: str, index: int) -> dict[str, Any]:
        prefix, slot = ("msg_", "content_index") if kind == "text" else ("rs_", "summary_index")
        return {"item_id": f"{prefix}{self._call.response_id}", "output_index": index, slot: 0}

    def _text_event(self, kind: str, index: int, step: str, **text: str) -> bytes:
        name = "output_text" if kind == "text" else "reasoning_summary_text"
        more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        return self._event(f"response.{name}.{step}", **self._place(kind, index), **text, **more)

    def _part_event(self, kind: str, index: int, step: str, part: dict[str, Any]) -> bytes:
        name = "content_part" if kind == "text" else "reasoning_summary_part"
        return self._event(f"response.{name}.{step}", **self._place(kind, index), part=part)

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
        return added + self._part_event(kind, index, "added", part)

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
        out += self._part_event(kind, index, "done", part)
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
