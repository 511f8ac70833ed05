"""What a rollout function returns, and how one is called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

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


@overload
def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: Literal[False], **kwargs: Any
) -> RolloutFnTrainOutput: ...


@overload
def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: Literal[True], **kwargs: Any
) -> RolloutFnEvalOutput: ...


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call `fn(args, rollout_id, data_source, evaluation=...)`; a bare list or dict it returns is wrapped."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if evaluation and isinstance(output, dict):
        return RolloutFnEvalOutput(output)
    if not evaluation and isinstance(output, list):
        return RolloutFnTrainOutput(output)
    wanted = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
    if isinstance(output, wanted):
        return output
    name = getattr(fn, "__qualname__", repr(fn))
    raise TypeError(
        f"rollout function {name} returned {type(output).__name__} with evaluation={evaluation}; "
        f"expected {wanted.__name__} or a plain {'dict' if evaluation else 'list'}."
    )
