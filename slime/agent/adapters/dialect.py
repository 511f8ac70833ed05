"""An API for chat clients: how requests are read into one form, and responses and streams are written."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slime.agent.adapters.client_errors import ApiError, invalid, want
from slime.agent.engine_access import Made
from slime.agent.history import Message
from slime.agent.parsing import ParsedModelOutput
from slime.agent.session import Asked, Session
from slime.agent.shown_pictures import Shown, shown
from slime.utils.media.pictures import NotAnImage

_NOT_JSON = "We could not parse the JSON body of your request"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped, or in bytes
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


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
    has_instructions: bool = False  # the first message applies to this request only
    keeps: bool = False  # a later request may name the response instead of sending it again
    after: str | None = None  # the id of the response that the messages follow
    response_id: str = ""  # set by the adapter
    tokenizer: Any = None  # set by the adapter


@dataclass(slots=True)
class Reply:
    """A complete response, from which every protocol writes its own form."""

    call: Call
    session: Session
    asked: Asked
    made: Made
    parsed: ParsedModelOutput
    message: Message

    @property
    def num_prompt(self) -> int:
        return self.asked.num_prompt

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []


class Stream(ABC):
    """The events of one streamed response, as bytes."""

    @abstractmethod
    def start(self, num_prompt: int) -> bytes: ...

    @abstractmethod
    def piece(self, kind: str, text: str, new: Made | None) -> bytes: ...

    @abstractmethod
    def end(self, reply: Reply) -> bytes:
        """Return all that follows the last piece: calls, usage, finish reason."""

    @abstractmethod
    def error(self, error: ApiError) -> bytes: ...


class ClientDialect(ABC):
    """One API: how its requests are read and its responses written."""

    path: ClassVar[str]

    @abstractmethod
    def read(self, body: dict[str, Any]) -> Call: ...

    @abstractmethod
    def answer(self, reply: Reply) -> dict[str, Any]: ...

    @abstractmethod
    def stream(self, call: Call) -> Stream: ...

    @abstractmethod
    def error(self, error: ApiError) -> dict[str, Any]: ...

    def key_in(self, body: Mapping[str, Any]) -> str | None:
        """Return the session's key, for protocols that may carry it in the body."""
        return None

    def count(self, num_tokens: int) -> dict[str, Any] | None:
        """Return the response to a request that counts tokens; None: this API has no such request."""
        return None


def json_object(raw: bytes) -> dict[str, Any]:
    """Parse the body of a request, which must be a JSON object whose text can be encoded again."""
    try:
        body = json.loads(raw)
        if _SURROGATE.search(raw):  # nearly always two escapes that make one character
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise invalid(f"{_NOT_JSON}: half of a surrogate pair stands alone") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"{_NOT_JSON}: {error}") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.")
    return body


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """Return a tool in the form of chat templates. Its name may be what both APIs allow."""
    if not _TOOL_NAME.fullmatch(want(name, str, f"{where}.name", "a string")):
        told = f"Invalid '{where}.name': string does not match pattern. Expected a string that matches the "
        raise invalid(f"{told}pattern '{_TOOL_NAME.pattern}'.", f"{where}.name")
    if parameters is not None:
        want(parameters, dict, f"{where}.parameters", "an object")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = want(description, str, f"{where}.description", "a string")
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def arguments_of(text: Any) -> Any:
    """Return the arguments of a call as a dict, as templates want them; text that is not JSON stays text."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def text_parts(content: Any, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a list of parts, which must all be of one of `kinds`."""
    text = content_parts(content, where, kinds, {})
    assert isinstance(text, str), "without pictures parts are text"
    return text


def content_parts(
    content: Any,
    where: str,
    kinds: Sequence[str],
    pictures: Mapping[str, Callable[[dict[str, Any], str], Any]],
) -> str | list[dict[str, Any]]:
    """Return the text of a message's parts, or the parts as templates take them if there are images.

    `pictures` maps the type of a part to a function that returns the address of its image.
    """
    texts: list[str] = []
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(want(content, list, where, "a string or a list")):
        name = f"{where}[{place}]"
        kind = want(part, dict, name, "an object").get("type")
        if isinstance(kind, str) and kind in pictures:
            parts.append({"type": "image", "image": _picture(pictures[kind](part, name), name)})
            continue
        if kind not in kinds:
            told = f"Invalid value: {kind!r}. Supported values are: {', '.join((*kinds, *pictures))}."
            raise invalid(told, f"{name}.type")
        texts.append(want(part.get("text", part.get("refusal")), str, f"{name}.text", "a string"))
        parts.append({"type": "text", "text": texts[-1]})
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _picture(address: Any, where: str) -> Shown:
    text = want(address, str, where, "a data URL")
    if not text.startswith("data:"):
        raise invalid(
            f"{text[:60]!r} is not fetched: send images as data URLs (data:image/png;base64,...).",
            where,
        )
    try:
        return shown(text)
    except NotAnImage as error:
        raise invalid(f"Invalid image: {error}.", where) from None


def paired(messages: list[Message]) -> list[Message]:
    """Return the messages with tool results in the order of their calls.

    Clients send results in the order in which tools finished; templates do not write call ids.
    A result without a call, or a call without a result, is refused as the real endpoints do.
    """
    out: list[Message] = []
    wanted: list[str] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        if message["role"] == "tool":
            end = at
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            results = messages[at:end]
            out.extend(_in_order(results, wanted, at))
            wanted, at = [], end
            continue
        if wanted:
            raise invalid(
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                f"'tool_call_id'. These ids have no response: {', '.join(wanted)}",
                f"messages[{at}].role",
            )
        wanted = [str(call["id"]) for call in message.get("tool_calls") or ()]
        out.append(message)
        at += 1
    if wanted:
        raise invalid(
            "tool calls were found without a result immediately after: " + ", ".join(wanted), "messages"
        )
    return out


def _in_order(results: list[Message], wanted: list[str], at: int) -> list[Message]:
    places = {call: place for place, call in enumerate(wanted)}
    given = [str(result.get("tool_call_id")) for result in results]
    stray = next((call for call in given if call not in places), None)
    if stray is not None:
        raise invalid(
            f"unexpected tool result {stray!r}: each result must have its call in the message before",
            f"messages[{at}].tool_call_id",
        )
    twice = next((call for call in given if given.count(call) > 1), None)
    if twice is not None:
        raise invalid(f"the call {twice!r} has more than one result", f"messages[{at}].tool_call_id")
    missing = [call for call in wanted if call not in given]
    if missing:
        raise invalid(f"these calls have no result: {', '.join(missing)}", f"messages[{at}]")
    return sorted(results, key=lambda result: places[str(result["tool_call_id"])])


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
