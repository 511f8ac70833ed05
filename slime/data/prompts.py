"""Turn one row of a prompt file into a Sample: keys, chat template, tools and media."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.utils.types import MultimodalTypes, Sample


@dataclass(frozen=True)
class PromptFormat:
    """How the rows of one dataset are read. A key that is None is not used."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = "metadata"
    tool_key: str | None = "tools"
    multimodal_keys: Mapping[str, str] | None = None  # media type ("image") -> column that holds the items
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def row_to_sample(row: dict, fmt: PromptFormat, tokenizer=None, processor=None, *, where: str = "row") -> Sample:
    """One row -> one PENDING sample without index; `where` names the row in error messages."""
    prompt = _get(row, fmt.input_key, "--input-key", where)
    metadata = _read_metadata(row, fmt.metadata_key, where)
    tools = _read_tools(row, fmt.tool_key, where)
    if tools is not None:
        metadata["tools"] = tools
    as_messages = fmt.apply_chat_template or bool(fmt.multimodal_keys)
    if isinstance(prompt, str) and as_messages:
        prompt = [{"role": "user", "content": prompt}]
    if fmt.multimodal_keys:
        prompt = fill_media(prompt, row, fmt.multimodal_keys, where=where)
    multimodal_inputs = _media_inputs(prompt, processor, where) if processor and fmt.multimodal_keys else None
    if fmt.apply_chat_template:
        prompt = render_prompt(prompt, tokenizer, tools=tools, kwargs=fmt.apply_chat_template_kwargs, where=where)
    return Sample(
        prompt=prompt,
        label=_get(row, fmt.label_key, "--label-key", where) if fmt.label_key is not None else None,
        metadata=metadata,
        multimodal_inputs=multimodal_inputs,
        apply_chat_template_kwargs=dict(fmt.apply_chat_template_kwargs),
    )


def render_prompt(messages, tokenizer, *, tools=None, kwargs: Mapping[str, Any] | None = None, where="row") -> str:
    """Messages -> the text the model sees, up to where its answer begins."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "--apply-chat-template is set but the tokenizer has no chat template; "
            "drop the flag or add a template to the tokenizer's folder."
        )
    if not isinstance(messages, list):
        raise ValueError(f"{where}: a prompt must be text or a list of messages, found {type(messages).__name__}.")
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **(kwargs or {})
    )


def fill_media(messages: list[dict], row: dict, keys: Mapping[str, str], *, where: str = "row") -> list[dict]:
    """Replace `<image>`-like placeholders in message texts by the row's media, in order; counts must match."""
    queues, types = {}, {}
    for name, column in keys.items():
        kind = MultimodalTypes.get(name)
        if kind is None:
            raise ValueError(f"--multimodal-keys names {name!r}; known are {[t.name for t in MultimodalTypes.all()]}.")
        items = row.get(column)
        if items is None:
            continue
        queues[kind.placeholder] = list(items) if isinstance(items, (list, tuple)) else [items]
        types[kind.placeholder] = kind.name
    # Without media in this row there is no placeholder to look for: an empty pattern would split every character.
    queues = {placeholder: items for placeholder, items in queues.items() if items}
    if not queues:
        return messages
    pattern = re.compile("(" + "|".join(re.escape(p) for p in queues) + ")")
    filled = [_fill_message(message, pattern, queues, types, where) for message in messages]
    left = {types[p]: len(items) for p, items in queues.items() if items}
    if left:
        raise ValueError(f"{where}: more media than placeholders in the prompt; left over: {left}.")
    return filled


def _fill_message(message: dict, pattern: re.Pattern, queues: dict, types: dict, where: str) -> dict:
    if not isinstance(message.get("content"), str):
        return message
    parts = []
    for piece in pattern.split(message["content"]):
        if piece in queues:
            if not queues[piece]:
                raise ValueError(f"{where}: more {piece} placeholders than items of that kind.")
            item = queues[piece].pop(0)
            parts.append(item if isinstance(item, dict) else {"type": types[piece], types[piece]: item})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}


def _media_inputs(messages: list[dict], processor, where: str) -> dict | None:
    """Images and videos of the conversation in the form the processor takes."""
    if not isinstance(messages, list):
        raise ValueError(f"{where}: a model with a processor needs the prompt as a list of messages.")
    found: dict[str, list] = {"images": [], "videos": []}
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part.get("type") in ("image", "video"):
                found[part["type"] + "s"].append(part[part["type"]])
    found = {name: items for name, items in found.items() if items}
    return found or None


def _get(row: dict, key: str, flag: str, where: str) -> Any:
    if key not in row:
        raise ValueError(f"{where}: no column {key!r} ({flag}); the row has {sorted(row)}.")
    return row[key]


def _read_metadata(row: dict, key: str | None, where: str) -> dict:
    value = row.get(key) if key is not None else None
    if value is None or value == "":
        return {}
    value = _parse_json(value, key, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {key!r} (--metadata-key) must be an object, found {type(value).__name__}.")
    return dict(value)


def _read_tools(row: dict, key: str | None, where: str) -> list | None:
    value = row.get(key) if key is not None else None
    if value is None:
        return None
    value = _parse_json(value, key, where)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list):
        raise ValueError(f"{where}: {key!r} (--tool-key) must be a list of tools, found {type(value).__name__}.")
    return value or None


def _parse_json(value: Any, key: str | None, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {key!r} is text but not valid JSON ({error}).") from error
