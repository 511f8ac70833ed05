"""Calls rewards in TRL's signature, functions of lists: `reward(prompts, completions, **columns) -> list`.

Such a function is recognised by its parameters: one is called `completions`, and the first is not `args`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime.utils.misc import load_function
from slime.utils.reward_failure import invalid
from slime.utils.types import Sample

PROMPT = "prompt"  # key in metadata: the messages from which a chat template made the prompt
_GIVEN = ("prompts", "completions", "completion_ids")
_TRAINERS = ("trainer_state", "log_extra", "log_metric", "environments")  # objects of TRL's trainer


@dataclass(frozen=True, slots=True)
class ColumnsAsked:
    """Columns that a function names, with and without a default; `everything`: it takes **columns.

    Example: `def reward(completions, answer, **columns)` asks for ("answer",), (), True.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    everything: bool


def needs_whole_group(group_rm: bool, path: str | None) -> bool:
    """Return whether rewards need the whole group: by --group-rm, or by TRL's signature."""
    return group_rm or (path is not None and takes_columns(load_function(path)))


def takes_columns(function: Callable[..., Any]) -> bool:
    """Return whether a reward function has TRL's signature."""
    names = list(_parameters(function))
    return "completions" in names and names[0] != "args"


def columns_asked(function: Callable[..., Any]) -> ColumnsAsked:
    """Return the columns that a function needs. ValueError: it needs an object of TRL's trainer."""
    required: list[str] = []
    optional: list[str] = []
    everything = False
    for name, parameter in _parameters(function).items():
        if parameter.kind is parameter.VAR_KEYWORD:
            everything = True
        elif name in _TRAINERS and parameter.default is parameter.empty:
            raise ValueError(f"it asks for {name!r}, an object of TRL's trainer; give it a default")
        elif name not in (*_GIVEN, *_TRAINERS):
            (required if parameter.default is parameter.empty else optional).append(name)
    return ColumnsAsked(tuple(required), tuple(optional), everything)


def reward_columns(
    function: Callable[..., Any], samples: Sequence[Sample], answers: Sequence[str]
) -> dict[str, list[Any]]:
    """Return the arguments of one call for these samples; `answers`: their responses without special tokens.

    If prompts are messages, a completion is a conversation of one message, as in TRL.
    """
    asked = columns_asked(function)
    prompts = [sample.metadata.get(PROMPT, sample.prompt) for sample in samples]
    completions = [
        [{"role": "assistant", "content": answer}] if isinstance(prompt, list) else answer
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    ids = [list(sample.tokens[len(sample.tokens) - sample.response_length :]) for sample in samples]
    columns: dict[str, list[Any]] = {"label": [sample.label for sample in samples]}
    for name in dict.fromkeys(name for sample in samples for name in sample.metadata):
        columns[name] = [sample.metadata.get(name) for sample in samples]
    columns |= {"prompts": prompts, "completions": completions, "completion_ids": ids}
    if asked.everything:
        columns.pop(PROMPT, None)
        return columns
    return {name: values for name, values in columns.items() if name in _parameters(function)}


def scores_of(values: Any) -> Any:
    """Return the scores of a call; None, TRL's "this does not apply", means that there is no score."""
    if not isinstance(values, (list, tuple)):
        return values
    failed = invalid("the reward function returned None for it")
    return [failed if value is None else value for value in values]


@functools.lru_cache(maxsize=128)  # reading a signature costs a tenth of a small rollout
def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # a builtin
        return {}
