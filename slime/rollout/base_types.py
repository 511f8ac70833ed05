"""Defines the result of a rollout function, and calls one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.types import Sample


@dataclass
class RolloutFnTrainOutput:
    """Samples for one batch: groups with an entry per execution, a Sample or its fan-out siblings."""

    samples: list[list[Sample | list[Sample]]] | list[Sample]
    metrics: dict[str, Any] | None = None
    cursor: dict[str, Any] | None = None  # state of the data source after this batch; None: ask it


@dataclass
class RolloutFnEvalOutput:
    """Evaluation: {dataset name: {"rewards": [...], "truncated": [...], "samples": [...]}}, lists aligned."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call `fn(args, rollout_id, data_source, evaluation=...)`; a bare list or dict it returns is wrapped."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    return eval_output(fn, output) if evaluation else train_output(fn, output)


def train_output(fn: Callable[..., Any], output: Any) -> RolloutFnTrainOutput:
    """Return what a rollout function made for training; a bare list of samples is wrapped."""
    if isinstance(output, list):
        return RolloutFnTrainOutput(output)
    if isinstance(output, RolloutFnTrainOutput):
        return output
    raise TypeError(f"{_returned(fn, output)}; expected RolloutFnTrainOutput or a plain list.")


def eval_output(fn: Callable[..., Any], output: Any) -> RolloutFnEvalOutput:
    """Return what a rollout function made of an evaluation; a bare dict is wrapped."""
    if isinstance(output, dict):
        return RolloutFnEvalOutput(output)
    if isinstance(output, RolloutFnEvalOutput):
        return output
    raise TypeError(f"{_returned(fn, output)}; expected RolloutFnEvalOutput or a plain dict.")


def _returned(fn: Callable[..., Any], output: Any) -> str:
    return f"rollout function {getattr(fn, '__qualname__', repr(fn))} returned {type(output).__name__}"
