"""The bodies of requests: clients send the whole conversation with every turn, and only what is new is read.

A body that begins with the bytes of the one before, up to its last message, is read from there on. A hash
says whether it does, so that no conversation is kept twice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime.agent.adapters.client_errors import invalid
from slime.agent.history import Message

_LISTS = ("messages", "input")  # what OpenAI and Anthropic call the conversation
_HEADS = ("system", "instructions")  # what stands before it, wherever it is in the body
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped, or in bytes
_space = re.compile(r"[ \t\n\r]*").match
_decode = json.JSONDecoder().raw_decode


@dataclass(slots=True)
class Known:
    """What was read of a session's last request."""

    path: str = ""
    head: tuple[Any, ...] = ()
    begin: int = 0  # of its messages, in bytes; 0: it cannot be gone on with
    cut: int = 0  # behind the last of them
    digest: bytes = b""  # of all bytes before the cut
    count: int = 0
    messages: list[Message] = field(default_factory=list)


@dataclass(slots=True)
class Body:
    """The fields of a request, of whose messages the first `start` are known and left out, and its hash."""

    fields: dict[str, Any]
    start: int
    digest: bytes
    known: Known
    following: Known  # what is known once this one is read

    def messages(self, read: Callable[[int], list[Message]]) -> list[Message]:
        """The whole conversation. `read` is given the number of the first message that it is to read."""
        new = read(self.start)
        self.following.messages = [*self.known.messages, *new] if self.start else new
        for name in Known.__slots__:
            setattr(self.known, name, getattr(self.following, name))
        return list(self.known.messages)


def read_body(raw: bytes, path: str, known: Known) -> Body:
    """The body of a request to `path`; `known` is what its session sent before."""
    made = _read_on(raw, path, known) if known.path == path and known.begin else None
    made = made or _read_whole(raw, path, known)
    if _SURROGATE.search(raw):  # nearly always two that make one character
        try:
            json.dumps(made.fields, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            told = "We could not parse the JSON body of your request: half of a surrogate pair stands alone"
            raise invalid(told) from None
    return made


def _read_on(raw: bytes, path: str, known: Known) -> Body | None:
    """The body, read from where a known conversation ended; None where it does not go on with that one."""
    view = memoryview(raw)
    digest = _hash(view[: known.cut])
    if len(raw) <= known.cut or digest.digest() != known.digest:
        return None
    rest = raw[known.cut :].lstrip(b" \t\n\r")
    if rest[:1] != b",":
        return None
    try:
        text = (raw[: known.begin] + rest[1:]).decode()
        fields, begin, end = _scan(text)
    except (ValueError, IndexError, RecursionError):
        return None
    new = next((fields[name] for name in _LISTS if name in fields), None)
    if not new or not _is_answer(new[0]) or _head(fields) != known.head or not begin:
        return None
    if not known.messages or known.messages[-1]["role"] == "assistant":
        return None
    cut = len(raw) - len(text[end:].encode())
    digest.update(view[known.cut : cut])
    following = Known(path, known.head, known.begin, cut, digest.digest(), known.count + len(new))
    digest.update(view[cut:])
    return Body(fields, known.count, digest.digest(), known, following)


def _read_whole(raw: bytes, path: str, known: Known) -> Body:
    view = memoryview(raw)
    try:
        text = raw.decode()
        fields, begin, end = _scan(text)
    except (ValueError, IndexError, RecursionError):
        # Whatever is odd about it, this says what it means or what is wrong with it.
        return Body(json_object(raw), 0, _hash(view).digest(), known, Known())
    following = Known()
    cut = len(text[:end].encode())
    digest = _hash(view[:cut])
    if begin:
        given = next(fields[name] for name in _LISTS if name in fields)
        begin = len(text[:begin].encode())
        following = Known(path, _head(fields), begin, cut, digest.digest(), len(given))
    digest.update(view[cut:])
    return Body(fields, 0, digest.digest(), known, following)


def _hash(data: memoryview) -> Any:
    return hashlib.blake2b(data, digest_size=16)


def _head(fields: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(fields.get(name) for name in _HEADS)


def _is_answer(given: Any) -> bool:
    """Whether a message, or an item of OpenAI's Responses, is the policy's.

    Nothing that stands before an answer depends on what follows it.
    """
    return isinstance(given, dict) and (
        given.get("role") == "assistant" or given.get("type") in ("reasoning", "function_call")
    )


def _scan(text: str) -> tuple[dict[str, Any], int, int]:
    """A JSON object, and between which characters the messages stand; 0 and 0 where that is not clear.

    ValueError or IndexError: it is none, or one that had better be read by `json`.
    """
    fields: dict[str, Any] = {}
    begin = end = 0
    at = _behind(text, 0, "{")
    while text[at] != "}":
        if fields:
            at = _behind(text, at, ",")
        if text[at] != '"':
            raise ValueError("a name must follow")
        name, at = _decode(text, at)
        if name in fields:
            raise ValueError("a name stands there twice")
        at = _behind(text, at, ":")
        if name in _LISTS and text[at] == "[":
            fields[name], start, last, at = _items(text, at)
            if fields[name] and all(isinstance(one, dict) for one in fields[name]):
                begin, end = start, last
        else:
            fields[name], at = _decode(text, at)
        at = _skip(text, at)
    if _skip(text, at + 1) != len(text):
        raise ValueError("something follows the object")
    if all(name in fields for name in _LISTS):
        raise ValueError("there are two conversations")
    return fields, begin, end


def _items(text: str, at: int) -> tuple[list[Any], int, int, int]:
    """(elements of a list, the place behind its bracket, behind its last element, behind the list)."""
    begin = at + 1
    items: list[Any] = []
    at = _skip(text, begin)
    if text[at] == "]":
        return items, begin, begin, at + 1
    while True:
        item, at = _decode(text, at)
        items.append(item)
        end, at = at, _skip(text, at)
        if text[at] == "]":
            return items, begin, end, at + 1
        at = _behind(text, at, ",")


def _skip(text: str, at: int) -> int:
    found = _space(text, at)
    assert found is not None, "no space is space, too"
    return found.end()


def _behind(text: str, at: int, mark: str) -> int:
    """Where the next thing stands behind `mark`, with space around it."""
    at = _skip(text, at)
    if text[at] != mark:
        raise ValueError(f"{mark} must stand there")
    return _skip(text, at + 1)


def json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise invalid(f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.")
    return body
