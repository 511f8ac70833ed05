"""Reads [api, body] lines; says of each, with 1 or 0, whether the types of the real SDK forbid it."""

import json
import sys

from anthropic.types.message_create_params import MessageCreateParams
from openai.types.chat.completion_create_params import CompletionCreateParams
from openai.types.responses.response_create_params import ResponseCreateParams
from pydantic import TypeAdapter, ValidationError

TYPES = {
    "chat": TypeAdapter(CompletionCreateParams),
    "responses": TypeAdapter(ResponseCreateParams),
    "anthropic": TypeAdapter(MessageCreateParams),
}


def look_at_all(value):
    """What is declared as an iterable is checked only when it is read."""
    if isinstance(value, dict):
        value = value.values()
    if not isinstance(value, (str, bytes)) and hasattr(value, "__iter__"):
        for one in value:
            look_at_all(one)


for line in sys.stdin:
    api, body = json.loads(line)
    try:
        look_at_all(TYPES[api].validate_python(body, strict=True))
        print(0)
    except ValidationError:
        print(1)
