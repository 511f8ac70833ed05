"""Text for the columns of the record: JSON of whatever a user's function produced, and prompts."""

import hashlib
import json
from typing import Any

import numpy as np


def json_text(value: object) -> str:
    """Return the JSON of any value; parts that JSON cannot express appear as their text.

    Example: {(1, 2): 0.5}, whose key is not text, becomes {"(1, 2)": "0.5"}.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=_number_or_text)
    except Exception:  # keys that are not text, cyclic values, a user's failing `__str__`
        shown = {_text(k): _text(v) for k, v in value.items()} if isinstance(value, dict) else _text(value)
        return json.dumps(shown, ensure_ascii=False)


def storable(text: str) -> str:
    """Replace lone surrogates, which a tokenizer may leave at a truncated response and UTF-8 cannot hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def prompt_text(prompt: object) -> str:
    """Return a prompt as one text; a conversation has one line per message."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (list, tuple)):
        return "\n".join(_message_text(message) for message in prompt)
    return str(prompt)


def prompt_hash(text: str) -> int:
    """Return a number that identifies the same prompt, also in another record."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _message_text(message: object) -> str:
    if not isinstance(message, dict):
        return str(message)
    content = message.get("content")
    if isinstance(content, list):  # parts of a multimodal message
        parts = [
            part.get("text", f"[{part.get('type', '?')}]") if isinstance(part, dict) else part
            for part in content
        ]
        content = " ".join(map(str, parts))
    return f"{message.get('role', '?')}: {content}"


def _number_or_text(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__qualname__}>"
