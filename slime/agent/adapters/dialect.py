"""Interface of a chat API: converts its requests into a common form, and writes responses and streams."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slime.agent.adapters.client_errors import ApiError, invalid
from slime.agent.engine_access import Made
from slime.agent.parsing import ParsedModelOutput
from slime.agent.session import Asked
from slime.agent.shown_pictures import Shown, shown
from slime.agent.trajectory import Message
from slime.utils.media.pictures import NotAnImage

_NOT_JSON = "We could not parse the JSON body of your request"


@dataclass(slots=True)
class Call:
    """One request for a response, whatever protocol it came in."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)  # named as in the engines' protocol
    stream: bool = False
    model: str = "policy"
    logprobs: bool = False
    include_usage: bool = True  # of a stream
    uses_tools: bool = True  # False: calls in the response are text
    must_call: bool = False  # the response is the JSON object of a call
    response_id: str = ""  # set by the adapter
    tokenizer: Any = None  # set by the adapter


@dataclass(slots=True)
class Reply:
    """A complete response, from which every protocol writes its own form."""

    call: Call
    asked: Asked
    made: Made
    parsed: ParsedModelOutput
    message: Message

    @property
    def num_prompt(self) -> int:
        return len(self.asked.prompt_ids)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []


class ClientDialect(ABC):
    """One API: reads its requests and writes its responses."""

    path: ClassVar[str]

    @abstractmethod
    def read(self, body: dict[str, Any]) -> Call: ...

    @abstractmethod
    def answer(self, reply: Reply) -> dict[str, Any]: ...

    @abstractmethod
    def events(self, reply: Reply) -> bytes:
        """Return the response as server-sent events, for a client that asked for a stream."""

    @abstractmethod
    def error(self, error: ApiError) -> dict[str, Any]: ...

    @abstractmethod
    def error_event(self, error: ApiError, call: Call) -> bytes:
        """Return the event that reports an error once a stream has started."""

    def count(self, num_tokens: int) -> dict[str, Any] | None:
        """Return the response to a request that counts tokens; None: this API has no such request."""
        return None


def json_object(raw: bytes) -> dict[str, Any]:
    """Parse the body of a request, which must be a JSON object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{_NOT_JSON}: {error}") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.")
    return body


NAMED = {"type": {"function", "tool"}, "name": str}  # a tool_choice
JSON_FORMATS: dict[str, Any] = {"text": {}, "json_object": {}, "json_schema": {"schema": dict}}


def constrained(call: Call, form: Any, choice: Any) -> Call:
    """Hold the response to the JSON schema of a format, or to a call where the client's `choice` is one."""
    schema = None
    if form is not None and form["type"] != "text":
        schema = form.get("json_schema", form).get("schema", {"type": "object"})
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        wanted = choice.get("function", choice).get("name") if isinstance(choice, dict) else None
        given = [tool["function"] for tool in call.tools if wanted in (None, tool["function"]["name"])]
        if not given:
            raise invalid(f"'tool_choice' asks for a tool that is not given: {wanted}", "tool_choice")
        fields = [{"name": {"const": one["name"]}, "arguments": one["parameters"]} for one in given]
        kinds = [{"type": "object", "properties": one, "required": list(one)} for one in fields]
        call.must_call, schema = True, {"anyOf": kinds}
    if schema is not None:
        call.sampling["json_schema"] = json.dumps(schema)
    return call


def function_tool(given: dict[str, Any], parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a tool in the form of chat templates."""
    function = {name: given[name] for name in ("name", "description") if given.get(name) is not None}
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def arguments_of(text: str) -> Any:
    """Return the arguments of a call as a dict, as templates want them; text that is not JSON stays text."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def content_of(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the text of a message, or its parts as templates take them if there are images."""
    if not isinstance(content, list):
        return content or ""
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(content):
        address = _address_of(part)
        if address is None:
            parts.append({"type": "text", "text": part.get("text", part.get("refusal"))})
        else:
            parts.append({"type": "image", "image": _picture(address, f"{where}[{place}]")})
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _address_of(part: dict[str, Any]) -> str | None:
    """Return the address of an image in the form of any API; None: the part is text."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return url
        case {"type": "input_image", "image_url": str(url)}:
            return url
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return url
        case {"type": "image", "source": {"media_type": media, "data": data}}:
            return f"data:{media};base64,{data}"
    return None


def _picture(address: str, where: str) -> Shown:
    if not address.startswith("data:"):
        message = f"{address[:60]!r} is not fetched: send images as data URLs (data:image/png;base64,...)."
        raise invalid(message, where)
    try:
        return shown(address)
    except NotAnImage as error:
        raise invalid(f"Invalid image: {error}.", where) from None


def paired(messages: list[Message]) -> list[Message]:
    """Return the messages with tool results in the order of their calls.

    Clients send results in the order in which tools finished; templates do not write call ids.
    A result without a call, or a call without a result, is refused as the real endpoints do.
    """
    out: list[Message] = []
    calls: list[str] = []
    rest = deque(messages)
    while True:
        results = {}
        while rest and rest[0]["role"] == "tool":
            result = rest.popleft()
            identity = result["tool_call_id"]
            if identity not in calls or identity in results:
                message = (
                    f"unexpected tool result {identity!r}: each must have its call in the message before"
                )
                raise invalid(message, "messages")
            results[identity] = result
        if missing := [call for call in calls if call not in results]:
            raise invalid(f"these tool calls have no result: {', '.join(missing)}", "messages")
        out += [results[call] for call in calls]
        if not rest:
            return out
        out.append(rest.popleft())
        calls = [call["id"] for call in out[-1].get("tool_calls") or ()]


def folded(messages: list[Message]) -> list[Message]:
    """Turn system messages within a conversation into reminders in the tool result or user message before.

    Many templates take a system message only at the start.
    """
    out: list[Message] = []
    for message in messages:
        if message["role"] != "system" or not any(m["role"] != "system" for m in out):
            out.append(message)
            continue
        reminder = f"<system-reminder>\n{message['content']}\n</system-reminder>"
        if out[-1]["role"] in ("tool", "user") and isinstance(out[-1]["content"], str):
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n{reminder}"}
        else:
            out.append({"role": "user", "content": reminder})
    return out
