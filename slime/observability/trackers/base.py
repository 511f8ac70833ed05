"""The interface of a tracker: a service that accepts numbers by step and tables of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slime.record import Kind, Record, RecordedSample, Select
from slime.utils.printable import printable

COLUMNS = ("step", "prompt", "response", "label", "reward", "outcome", "status", "tokens")
_MAX_TEXT = 2000  # characters of a cell


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Samples of one rollout or evaluation, with control characters removed and long texts truncated.

    Example: SampleTable("samples/train", "rollout/step", 3, ((3, "1+1=", "2", "2", 1.0, "trained",
    "completed", 2),)).
    """

    name: str
    step_key: str
    step: int
    rows: tuple[tuple[str | int | float | None, ...], ...]  # a value for each of COLUMNS


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The data about a run that trackers get. `options`: flags of trackers; `config`: all settings."""

    id: str
    name: str
    folder: Path
    options: Mapping[str, Any]
    config: Mapping[str, Any]


class Service(Protocol):
    """One connection to a tracker. Opening it again with the same run continues that run.

    After an exception the service is opened again, and everything since the last `flush` is sent again.
    """

    def __init__(self, run: TrackedRun) -> None: ...

    def scalars(self, values: Mapping[str, float], step_key: str, step: int, time: float) -> None:
        """Record numbers at a step of the axis `step_key`; `time` in seconds since 1970."""

    def table(self, table: SampleTable) -> None: ...

    def flush(self) -> None:
        """Block until everything sent so far is stored; most services store at once."""

    def finish(self) -> None: ...


def sample_tables(record: Record, kind: Kind, rollout_id: int, max_rows: int) -> Iterator[SampleTable]:
    """Yield the first samples of a rollout, or of each dataset of an evaluation, as tables."""
    step_key = "eval/step" if kind == "eval" else "rollout/step"
    for dataset in record.datasets(kind, rollout_id):
        select = Select(kind=kind, rollout_id=rollout_id, dataset=dataset, limit=max_rows)
        name = f"samples/{kind}" + (f"/{printable(dataset)}" if dataset else "")
        yield SampleTable(name, step_key, rollout_id, tuple(map(_row, record.samples(select))))


def _row(sample: RecordedSample) -> tuple[str | int | float | None, ...]:
    outcome = f"{sample.outcome}: {sample.reason}" if sample.reason else sample.outcome
    return (
        sample.rollout_id,
        _cell(sample.prompt),
        _cell(sample.response),
        None if sample.label is None else _cell(sample.label),
        sample.reward,
        _cell(outcome),
        sample.status,
        sample.num_tokens,
    )


def _cell(text: str) -> str:
    left_out = len(text) - _MAX_TEXT
    return printable(text[:_MAX_TEXT]) + (f" ... ({left_out} more characters)" if left_out > 0 else "")
