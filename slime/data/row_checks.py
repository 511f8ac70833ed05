"""Validates prompts and labels of rows; an error names the row, the key and the fix."""

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

from slime.catalog.rewards import find_reward

_EXAMPLE = '[{"role": "user", "content": "..."}]'
# Keys that an assistant's message may have in place of content.
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content")


class PromptUse(Enum):
    """The part of the program that reads a dataset's prompts; it decides which forms of prompt are valid."""

    ENGINE = "the engine: text, or messages that the chat template makes text of"
    CONVERSATION = "supervised training: messages"
    UNKNOWN = "a reader of any kind: text or messages"
    OWN_CODE = "a function of the user: anything that it understands"


def check_prompt(prompt: Any, key: str, use: PromptUse, *, rendered: bool, where: object) -> None:
    """`rendered`: the chat template is applied, or media are put in, both of which need text or messages."""
    if use is PromptUse.OWN_CODE and not rendered:
        return
    what = f"{where}: the prompt in {key!r} (--input-key)"
    if isinstance(prompt, str):
        _check_text_prompt(prompt, what, use)
    elif isinstance(prompt, list):
        check_messages(prompt, what, may_be_empty=use is PromptUse.OWN_CODE)
        if use is PromptUse.ENGINE and not rendered:
            hint = "engines continue text: set --apply-chat-template, or write text"
            raise ValueError(f"{what} is a list of messages; {hint}.")
    else:
        hint = "; a number belongs in quotes" if type(prompt) in (int, float) else ""
        raise ValueError(f"{what} is {_show(prompt)}; write text, or messages as {_EXAMPLE}{hint}.")


def _check_text_prompt(prompt: str, what: str, use: PromptUse) -> None:
    if use is PromptUse.CONVERSATION:
        raise ValueError(f"{what} is text; supervised training needs messages as {_EXAMPLE}.")
    if use is not PromptUse.OWN_CODE and not prompt.strip():
        found = "only white space" if prompt else "empty"
        raise ValueError(f"{what} is {found}; write text or drop the row.")
    check_encodable(prompt, what)


def check_messages(messages: Sequence[Any], what: str, *, may_be_empty: bool = False) -> None:
    if not messages:
        raise ValueError(f"{what} is an empty list; write messages as {_EXAMPLE} or drop the row.")
    for number, message in enumerate(messages):
        _check_message(message, f"{what}, message {number}")
    if not may_be_empty and not any(_has_content(message) for message in messages):
        raise ValueError(f"{what} has no message with content; write text or drop the row.")


def _check_message(message: Any, what: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{what} is {_show(message)}; messages look like {_EXAMPLE}.")
    if not isinstance(message.get("role"), str) or not message["role"]:
        only = f"has no role, only {sorted(message)}"
        found = f"has role {message['role']!r}" if "role" in message else only
        raise ValueError(f"{what} {found}; messages look like {_EXAMPLE}.")
    what += f" ({message['role']})"
    content = message.get("content")
    if isinstance(content, str):
        check_encodable(content, what)
    elif isinstance(content, list):
        _check_parts(content, what)
    elif isinstance(content, dict) and message["role"] == "tool":
        return  # a tool's result; templates write it as JSON
    elif content is not None:
        raise ValueError(f"{what} has content {_show(content)}; write text or a list of parts.")
    elif not any(message.get(name) for name in _INSTEAD_OF_CONTENT):
        found = "content null" if "content" in message else f"no content, only {sorted(message)}"
        raise ValueError(f'{what} has {found}; write text ("" for none, which only tool calls allow).')


def _check_parts(parts: list[Any], what: str) -> None:
    for part in parts:
        if not isinstance(part, (str, dict)):
            example = '{"type": "text", "text": "..."}'
            raise ValueError(f"{what} has a part {_show(part)} in its content; parts look like {example}.")
        text = part if isinstance(part, str) else part.get("text")
        if isinstance(text, str):
            check_encodable(text, what)


def _has_content(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content)


def check_encodable(text: str, what: str) -> None:
    """Refuse half of a surrogate pair, which JSON can write and no tokenizer can read."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has \\u{ord(text[error.start]):04x} at character {error.start + 1}, half of a pair "
            "that makes one character; write both halves or drop it."
        ) from None


def check_label(label: Any, key: str, rm_type: str | None, where: object) -> None:
    """Check that the built-in reward `rm_type` can compare with the label; None: its reader takes any."""
    what = f"{where}: the label in {key!r} (--label-key)"
    if isinstance(label, float) and not math.isfinite(label):
        raise ValueError(f"{what} is {label}, which no answer can equal; write the answer or drop the row.")
    reward = find_reward(rm_type)
    if reward is None or reward.label == "any":
        return
    if label is None or label == "" or label == []:
        raise ValueError(
            f"{what} is {_show(label)}, and --rm-type {rm_type} compares with it; write the answer."
        )
    if isinstance(label, dict) or (isinstance(label, list) and reward.label == "one"):
        raise ValueError(
            f"{what} is {_show(label)}; --rm-type {rm_type} compares with one answer: text or a number."
        )


def _show(value: Any) -> str:
    """Format a value for a message: short, and as JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, dict)):
        name = "a list" if isinstance(value, list) else "an object"
        return name if value else f"{name} without entries"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
