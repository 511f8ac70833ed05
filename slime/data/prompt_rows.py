"""Turns one row of a prompt file into a Sample: keys, chat template, tools and media."""

import contextlib
import datetime
import decimal
import difflib
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.data.media import bare_messages, fill_media, read_pictures
from slime.data.prompt_files import parse_json
from slime.data.prompt_sources import Row
from slime.data.row_checks import PromptUse, check_label, check_messages, check_prompt
from slime.utils.column_rewards import PROMPT, ColumnsAsked
from slime.utils.mask_utils import find_dropped_message
from slime.utils.templates import template_parts
from slime.utils.types import Sample

Message = dict[str, Any]
_SHOWN = 20  # column names in a message


@dataclass(frozen=True)
class PromptFormat:
    """Options of reading the rows of one dataset. A key that is None is not used."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = "metadata"
    tool_key: str | None = "tools"
    multimodal_keys: Mapping[str, str] | None = None  # media type ("image") -> column that holds the items
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    use: PromptUse = PromptUse.UNKNOWN
    rm_type: str | None = None  # reward of rows that name none; None: something else reads labels
    label_is_messages: bool = False  # preference pairs: the label is a conversation, too
    prompt_template: str | None = (
        None  # "Q: {question}": the prompt is text made of columns, not of input_key
    )
    label_pattern: str | None = None  # regular expression that finds the label in its column
    metadata_columns: tuple[str, ...] = ()  # also in the metadata, by their names; "*": all
    reward_columns: ColumnsAsked | None = None  # so are these, for a reward in TRL's signature

    @property
    def as_messages(self) -> bool:
        return self.apply_chat_template or bool(self.multimodal_keys)


def read_fields(
    row: Row, fmt: PromptFormat, where: object
) -> tuple[Any, Any, dict[str, Any], list[Any] | None]:
    """Return prompt, label, metadata and tools of a row, checked as far as possible without a tokenizer."""
    if fmt.prompt_template is None:
        prompt = _get(row, fmt.input_key, "--input-key", where)
    else:
        prompt = fill_template(fmt.prompt_template, row, where)
    rendered = fmt.apply_chat_template or (fmt.as_messages and fmt.use is not PromptUse.ENGINE)
    check_prompt(prompt, fmt.input_key, fmt.use, rendered=rendered, where=where)
    metadata = _read_metadata(row, fmt.metadata_key, where)
    metadata |= _kept_columns(row, fmt, where)
    tools = _read_tools(row, fmt.tool_key, where)
    if fmt.label_key is None:
        return prompt, None, metadata | _columns_for_reward(row, fmt, prompt, where), tools
    label = _get(row, fmt.label_key, "--label-key", where)
    if fmt.label_pattern is not None:
        label = find_label(label, fmt.label_pattern, fmt.label_key, where)
    if fmt.label_is_messages:
        _check_conversation(label, fmt.label_key, where)
    else:
        rm_type = None if fmt.rm_type is None else str(metadata.get("rm_type") or fmt.rm_type)
        check_label(label, fmt.label_key, rm_type, where)
    row = {"label": label} | row | {fmt.label_key: label}
    return prompt, label, metadata | _columns_for_reward(row, fmt, prompt, where), tools


def _check_conversation(label: Any, key: str, where: object) -> None:
    what = f"{where}: the label in {key!r} (--label-key)"
    if not isinstance(label, list):
        raise ValueError(
            f"{what} is {type(label).__name__}; a preference pair is two lists of messages, read with "
            "--input-key chosen --label-key rejected."
        )
    check_messages(label, what)


def row_to_sample(
    row: Row, fmt: PromptFormat, tokenizer: Any = None, processor: Any = None, *, where: object = "row"
) -> Sample:
    """Convert one row to one PENDING sample without index; `where` names the row in error messages."""
    prompt, label, metadata, tools = read_fields(row, fmt, where)
    if tools is not None:
        metadata["tools"] = tools
    if isinstance(prompt, str) and fmt.as_messages:
        prompt = [{"role": "user", "content": prompt}]
    if fmt.multimodal_keys:
        prompt = fill_media(prompt, row, fmt.multimodal_keys, where=where)
    multimodal_inputs = None
    if processor and fmt.multimodal_keys:
        multimodal_inputs = read_pictures(prompt, fmt.multimodal_keys, where)
    if fmt.apply_chat_template:
        prompt = render_prompt(
            prompt, tokenizer, tools=tools, kwargs=fmt.apply_chat_template_kwargs, where=where
        )
    return Sample(
        prompt=prompt,
        label=label,
        metadata=metadata,
        multimodal_inputs=multimodal_inputs,
        apply_chat_template_kwargs=dict(fmt.apply_chat_template_kwargs),
    )


def render_prompt(
    messages: list[Message],
    tokenizer: Any,
    *,
    tools: list[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    where: object = "row",
) -> str:
    """Render messages to the text that the model sees, up to where its response begins."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "--apply-chat-template is set but the tokenizer has no chat template; "
            "drop the flag or add a template to the tokenizer's folder."
        )
    try:
        text: str = tokenizer.apply_chat_template(
            bare_messages(messages), tools=tools, tokenize=False, add_generation_prompt=True, **(kwargs or {})
        )
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise ValueError(
            f"{where}: the chat template of the tokenizer refuses this prompt ({type(error).__name__}: "
            f"{error})."
        ) from error
    dropped = find_dropped_message(messages, text)
    if dropped is not None:
        raise ValueError(
            f"{where}: the chat template drops message {dropped}, whose role {messages[dropped]['role']!r} "
            "it does not know; write a role it knows (system, user, assistant, tool)."
        )
    left_out = next((name for name in map(_tool_name, tools or ()) if name and name not in text), None)
    if left_out is not None:
        raise ValueError(
            f"{where}: the chat template of the tokenizer leaves out the tool {left_out!r}: it has no place "
            "for tools; describe them in a system message, use a model whose template has one, or name no "
            "column of tools (--tool-key)."
        )
    return text


def _tool_name(tool: Any) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _get(row: Row, key: str, flag: str, where: object) -> Any:
    if key not in row:
        near = difflib.get_close_matches(key, row, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        names = f"{sorted(row)[:_SHOWN]}" + (" and more" if len(row) > _SHOWN else "")
        raise ValueError(f"{where}: no column {key!r} ({flag}); {hint}the row has {names}: name one of them.")
    return row[key]


def fill_template(template: str, row: Row, where: object) -> str:
    """Return the prompt that a template makes of a row."""
    pieces = []
    for text, name in template_parts(template):
        pieces.append(text)
        if name is not None:
            value = _get(row, name, "--prompt-template", where)
            if value is None or isinstance(value, (list, dict)):
                raise ValueError(
                    f"{where}: column {name!r} (--prompt-template) is {type(value).__name__}; a template "
                    "takes text and numbers."
                )
            pieces.append(str(value))
    return "".join(pieces)


def find_label(value: Any, pattern: str, key: str, where: object) -> str:
    """Return the first group of the pattern's last match, or the whole match, stripped of whitespace."""
    matches = list(re.finditer(pattern, value)) if isinstance(value, str) else []
    if not matches:
        shown = repr(value) if len(repr(value)) <= 80 else "..." + repr(value)[-77:]
        raise ValueError(f"{where}: --label-pattern {pattern!r} finds nothing in column {key!r}: {shown}.")
    return str(matches[-1][1 if matches[-1].re.groups else 0] or "").strip()


def _kept_columns(row: Row, fmt: PromptFormat, where: object) -> dict[str, Any]:
    everything = "*" in fmt.metadata_columns
    kept = {}
    for name in row if everything else fmt.metadata_columns:
        try:
            kept[name] = _plain(_get(row, name, "--metadata-columns", where))
        except TypeError as error:
            if not everything:
                raise ValueError(f"{where}: column {name!r} (--metadata-columns) holds {error}.") from None
    return kept


def _columns_for_reward(row: Row, fmt: PromptFormat, prompt: Any, where: object) -> dict[str, Any]:
    """Return the columns that a reward in TRL's signature reads, and messages for the chat template."""
    asked = fmt.reward_columns
    if asked is None:
        return {}
    kept = {PROMPT: prompt} if isinstance(prompt, list) else {}
    for name in dict.fromkeys((*asked.required, *asked.optional, *(row if asked.everything else ()))):
        if name in row or name in asked.required:
            value = _get(row, name, "a parameter of the reward function", where)
            with contextlib.suppress(TypeError):  # a picture or similar: not kept
                kept[name] = _plain(value)
    return kept


def _plain(value: Any) -> Any:
    """Return a value that checkpoints can hold: table types beyond JSON (dates, decimals) become text."""
    if value is None or isinstance(value, (str, int, float, bytes)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)):
        return str(value)
    raise TypeError(f"a {type(value).__name__}, which checkpoints cannot keep")


def _read_metadata(row: Row, key: str | None, where: object) -> dict[str, Any]:
    value = row.get(key) if key is not None else None
    if value is None or value == "":
        return {}
    value = _parse_json(value, key, where)
    if not isinstance(value, dict):
        raise ValueError(
            f"{where}: {key!r} (--metadata-key) must be an object, found {type(value).__name__}."
        )
    return dict(value)


def _read_tools(row: Row, key: str | None, where: object) -> list[Any] | None:
    value = row.get(key) if key is not None else None
    if value is None:
        return None
    value = _parse_json(value, key, where)
    if not isinstance(value, list):
        raise ValueError(
            f"{where}: {key!r} (--tool-key) must be a list of tools, found {type(value).__name__}."
        )
    return value or None


def _parse_json(value: Any, key: str | None, where: object) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"{where}: {key!r} is text, but {error}.") from None
