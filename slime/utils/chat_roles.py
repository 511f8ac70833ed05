"""Finds messages that a chat template leaves out because it does not know their role."""

from collections.abc import Sequence
from typing import Any

# Templates write these, or refuse them by name. Other roles many of them skip without a word.
_COMMON_ROLES = frozenset({"system", "user", "assistant", "tool"})


def has_uncommon_role(messages: Sequence[dict[str, Any]]) -> bool:
    return any(message.get("role") not in _COMMON_ROLES for message in messages)


def find_dropped_message(messages: Sequence[dict[str, Any]], text: str) -> int | None:
    """Return the first message of an uncommon role that the rendered text lacks; None: it has all."""
    for number, message in enumerate(messages):
        content = message.get("content")
        if message.get("role") in _COMMON_ROLES or not isinstance(content, str):
            continue
        if content.strip() not in text:
            return number
    return None
