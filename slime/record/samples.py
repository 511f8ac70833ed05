"""The rows of a rollout in the record: one per group and one per sample, with its token-level numbers."""

import json
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.record.images import images_of_group
from slime.record.texts import json_text, prompt_hash, prompt_text, storable
from slime.utils import codec
from slime.utils.packed_samples import values_of
from slime.utils.types import Sample, flatten_samples

_ALL_ONES = 1  # encodes a loss mask that trains the whole response


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt group with its outcome.

    Example: Entry((sample, sample), "filtered", "zero_std_1.0") is a group that a filter dropped because
    all of its responses were right. `dataset` is the name of an evaluation's dataset.
    """

    samples: tuple[Sample, ...]
    outcome: str = "trained"
    reason: str | None = None
    dataset: str | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The numbers of a sample. Log-probs and mask have one entry per response token; None: not known."""

    ids: list[int]
    log_probs: list[float] | None
    loss_mask: list[int] | None
    versions: list[tuple[str, int, int]]
    execution: int | None  # siblings of one fan-out, and both members of a pair, share it
    # Of an agent's episode: number, start and end in the response, tool calls, times, ... of each turn.
    turns: list[dict[str, Any]] = field(default_factory=list)


def group_entries(
    samples: Sequence[Sample | Sequence[Sample | Sequence[Sample]]],
    outcome: str,
    reason: str | None = None,
    dataset: str | None = None,
) -> list[Entry]:
    """Return entries for the result of a rollout function: groups, or samples with group indices."""
    groups: dict[tuple[str, int], list[Sample]] = {}
    for number, item in enumerate(samples):
        for sample in flatten_samples([item]):
            index = sample.group_index
            key = ("position", number) if index is None else ("index", index)
            groups.setdefault(key, []).append(sample)
    return [Entry(tuple(group), outcome, reason, dataset) for group in groups.values()]


def reward_number(sample: Sample, key: str | None) -> float | None:
    """Return the reward as one number (for a dict the entry `key`); None: there is none."""
    value: Any = sample.reward
    value = value.get(key) if isinstance(value, dict) and key else value
    try:
        return float(value) if isinstance(value, (int, float, np.generic)) else None
    except (ValueError, TypeError, OverflowError):  # numpy text, or an integer too large for a float
        return None


def write_groups(
    connection: sqlite3.Connection,
    rollout: int,
    entries: Sequence[Entry],
    rewards: Sequence[Sequence[float | None]],
) -> None:
    """Add the groups of a rollout's row, with their samples. `rewards`: of the samples of each group."""
    rows: list[tuple[object, ...]] = []
    for entry, numbers in zip(entries, rewards, strict=True):
        group = connection.execute(
            "INSERT INTO groups (rollout, dataset, group_index, prompt, prompt_hash, label, outcome, reason, "
            "spread) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (rollout, *_group_row(entry, numbers)),
        ).lastrowid
        rows += [(group, *_sample_row(sample, n)) for sample, n in zip(entry.samples, numbers, strict=True)]
        images = [(group, *image) for image in images_of_group(entry.samples)]
        connection.executemany("INSERT INTO images VALUES (?, ?, ?, ?)", images)
    connection.executemany(
        "INSERT INTO samples (group_row, sample_index, execution, status, reward, reward_parts, failure, "
        "response, num_tokens, numbers) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        rows,
    )


def _group_row(entry: Entry, rewards: Sequence[float | None]) -> tuple[object, ...]:
    first = entry.samples[0]
    known = [reward for reward in rewards if reward is not None]
    prompt, label = storable(prompt_text(first.prompt)), first.label
    return (
        entry.dataset,
        first.group_index,
        prompt,
        prompt_hash(prompt),
        None if label is None else storable(label if isinstance(label, str) else json_text(label)),
        entry.outcome,
        None if entry.reason is None else storable(str(entry.reason)),
        max(known) - min(known) if len(known) > 1 else None,
    )


def _sample_row(sample: Sample, reward: float | None) -> tuple[object, ...]:
    failure = sample.reward_failure
    mask = [0] * sample.response_length if sample.remove_sample else values_of(sample, "loss_mask")
    return (
        sample.index,
        sample.rollout_id,
        sample.status.value,
        reward,
        storable(json_text(sample.reward)) if isinstance(sample.reward, dict) else None,
        None if failure is None else storable(f"{failure.kind}: {failure.reason}"),
        storable(sample.response),
        sample.response_length,
        encode_numbers(
            values_of(sample, "tokens"),
            values_of(sample, "rollout_log_probs"),
            mask,
            sample.response_length,
            sample.version_spans,
            _turns_of(sample),
        ),
    )


def _turns_of(sample: Sample) -> list[dict[str, Any]]:
    """Return the turns of an episode; empty for any other sample, and for metadata of another form."""
    turns = sample.metadata.get("turns")  # slime.agent.trajectory.TURNS_KEY
    if isinstance(turns, list) and all(isinstance(turn, dict) and "start" in turn for turn in turns):
        return turns
    rewards = enumerate(sample.turn_rewards or ())
    return [{"turn": n, "start": start, "end": end, "reward": r} for n, (start, end, r) in rewards]


def encode_numbers(
    ids: Any, log_probs: Any, mask: Any, length: int, versions: Any, turns: Sequence[dict[str, Any]] = ()
) -> bytes:
    """Encode a sample's token ids, log-probs (as float32), loss mask, version spans and turns, if any."""
    mask = _as_list(mask)
    if mask is not None and len(mask) == length and mask.count(1) == length:
        mask = _ALL_ONES
    ids = ids if isinstance(ids, np.ndarray) and ids.dtype == np.int32 else _as_list(ids)
    singles = None if log_probs is None else np.asarray(log_probs, "<f4")
    more = [storable(json_text(turns))] if turns else []
    return codec.encode([ids, singles, mask, [tuple(span) for span in versions], *more])


def read_tokens(connection: sqlite3.Connection, row: int) -> Tokens:
    """Return the numbers of the sample with this row. ValueError or TypeError: they are damaged."""
    query = "SELECT num_tokens, execution, numbers FROM samples WHERE id = ?"
    length, execution, numbers = connection.execute(query, (row,)).fetchone()
    if numbers is None:
        return Tokens([], None, None, [], execution)
    ids, log_probs, mask, versions, *more = codec.decode(numbers)
    return Tokens(
        _as_list(ids),
        _as_list(log_probs),
        [1] * length if mask == _ALL_ONES else mask,
        [(str(version), int(start), int(end)) for version, start, end in versions],
        execution,
        json.loads(more[0]) if more else [],
    )


def _as_list(values: Any) -> Any:
    """Return arrays and tensors of a user's function as lists."""
    return values if values is None or type(values) is list else np.asarray(values).tolist()


def checksum(connection: sqlite3.Connection, rollout: int) -> int:
    """Return a checksum of the samples of a rollout's row.

    The audit compares it with the checksum that was stored with the samples: SQLite detects damage to its own
    structure, not to values.
    """
    rows = connection.execute(
        "SELECT s.numbers, s.num_tokens, s.reward, s.response FROM samples s "
        "JOIN groups g ON g.id = s.group_row WHERE g.rollout = ? ORDER BY s.id",
        (rollout,),
    )
    found = 0
    for numbers, *others in rows:
        found = zlib.crc32(repr(others).encode(), zlib.crc32(numbers or b"", found))
    return found
