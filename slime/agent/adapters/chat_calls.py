"""A request as every protocol reads it, with messages in the one form that templates know."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent.adapters.client_errors import invalid, want
from slime.agent.adapters.unused import PART, check_unused
from slime.agent.history import Message
from slime.agent.shown_pictures import Shown, shown
from slime.utils.media.pictures import NotAnImage

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@dataclass(slots=True)
class Call:
    """One request for an answer, whatever protocol it came in."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)  # in the words of the engines' protocol
    stream: bool = False
    model: str = "policy"
    logprobs: bool = False
    include_usage: bool = True  # of a stream
    uses_tools: bool = True  # False: calls in the answer are text
    has_instructions: bool = False  # the first message is no part of what a later request goes on with
    keeps: bool = False  # a later request may name the answer instead of sending it again
    after: str | None = None  # the id of the answer that the messages follow
    response_id: str = ""  # set by the adapter
    tokenizer: Any = None  # set by the adapter


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as templates know it. Its name may be what both APIs allow: it stands in what models write."""
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
    """Arguments as templates want them, a dict; what is not JSON stays the text that it is."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def text_parts(content: Any, where: str, kinds: Sequence[str]) -> str:
    """The text of a list of parts, all of which must be of one of `kinds`."""
    text = content_parts(content, where, kinds, {})
    assert isinstance(text, str), "without pictures parts are text"
    return text


def content_parts(
    content: Any,
    where: str,
    kinds: Sequence[str],
    pictures: Mapping[str, Callable[[dict[str, Any], str], Any]],
) -> str | list[dict[str, Any]]:
    """The parts of a message: their text, or as templates take them where there are pictures among them.

    `pictures` reads, by the type of a part, the address that the part gives of a picture.
    """
    texts: list[str] = []
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(want(content, list, where, "a string or a list")):
        name = f"{where}[{place}]"
        kind = want(part, dict, name, "an object").get("type")
        check_unused(part, PART, name)
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
            f"{text[:60]!r} is not fetched: images are taken as data URLs (data:image/png;base64,...), since "
            "this endpoint asks nobody else.",
            where,
        )
    try:
        return shown(text)
    except NotAnImage as error:
        raise invalid(f"Invalid image: {error}.", where) from None


def paired(messages: list[Message], start: int = 0) -> list[Message]:
    """The same messages with the results of several calls in the order of the calls.

    Clients send results in the order in which tools ended; templates do not write which call each answers.
    A result without a call, or a call without a result, is refused as the real endpoints do. `start` is the
    number of messages before these.
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
            out.extend(_in_order(results, wanted, start + at))
            wanted, at = [], end
            continue
        if wanted:
            raise invalid(
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                f"'tool_call_id'. These ids have no response: {', '.join(wanted)}",
                f"messages[{start + at}].role",
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
    """System messages within a conversation as reminders: in the tool result before them, or a user's words.

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
