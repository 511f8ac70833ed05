"""Defines the output of a dynamic sampling filter, calls filters, and counts dropped groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class DynamicFilterOutput:
    """The verdict on one group.

    `reason` names a drop in the metrics. With `keep_when_insufficient` a dropped group is used after all when
    the groups still in flight cannot fill the batch.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call the filter (None keeps everything); a plain true or false is wrapped."""
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    if isinstance(output, DynamicFilterOutput):
        return output
    value = output.item() if hasattr(output, "item") else output  # of numpy or torch
    if not isinstance(value, (bool, int, float)):  # a text or a coroutine would count as true
        name = f"{fn.__module__}.{fn.__qualname__}"
        wanted = "return DynamicFilterOutput(keep=...) or a bool"
        raise ValueError(f"dynamic sampling filter {name} returned {value!r:.80}: {wanted}")
    return DynamicFilterOutput(keep=bool(value))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Return whether to drop the group; `remaining_batch_size` groups, this one too, can fill the batch."""
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts dropped groups by reason over one rollout."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        self._dropped[reason or "unspecified"] += 1

    def reasons(self) -> str:
        """Example: "zero_std_1.0 900, too_long 100"."""
        return ", ".join(f"{reason} {count}" for reason, count in self._dropped.most_common(5))

    def collect(self) -> dict[str, int]:
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}
