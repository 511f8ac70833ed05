"""The rows of a rollout in the record: one for each group, one for each answer, and the answers' numbers."""

from __future__ import annotations

import itertools
import json
import operator
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.record.any_json import any_json, plain_or_text, storable
from slime.record.checksums import checksum_of, in_columns
from slime.record.entries import Entry, prompt_hash, prompt_text
from slime.record.numbers import Columns, mask_of, pack_alone, pack_groups
from slime.record.rows import insert_columns
from slime.record.schema import MANY_SAMPLES, index_orders
from slime.utils.reward_failure import RewardFailure

# `json.dumps` makes one for each call.
_encode = json.JSONEncoder(ensure_ascii=False, default=plain_or_text).encode
_FLOATS = frozenset({float})
# Fields of a sample, and the columns that hold them as they are.
_AS_THEY_ARE = {"index": "sample_index", "response_length": "num_tokens", "rollout_id": "execution"}
_OTHERS = ("remove_sample", "status", "response", "reward_failure", "reward")
_OF_GROUP = (
    "dataset", "group_index", "prompt", "prompt_hash", "label", "outcome", "reason",
    "spread",
)  # fmt: skip
_NAMES = (*Columns._fields, *_AS_THEY_ARE, *_OTHERS)
_MASKS, _REMOVED = _NAMES.index("loss_mask"), _NAMES.index("remove_sample")
_of_sample = operator.itemgetter(*_NAMES)


class Answers:
    """The answers of some groups by columns; of each, what is written is asked for once.

    `key`: which number of a reward, where it has several parts.
    """

    def __init__(self, entries: Sequence[Entry], key: str | None):
        self.entries = entries
        self.samples = [sample for entry in entries for sample in entry.samples]
        # All fields in one go: to ask each sample for each of them takes three times as long.
        self.values = list(zip(*[_of_sample(sample.__dict__) for sample in self.samples], strict=True))
        if self.values and any(self.values[_REMOVED]):
            self.values[_MASKS] = tuple(map(mask_of, self.samples))
        found = self.values[-1] if self.values else ()
        plain = _FLOATS.issuperset(map(type, found))
        self.rewards: Sequence[float | None] = found if plain else [_number(reward, key) for reward in found]

    @property
    def mean_reward(self) -> float | None:
        known = self.rewards if None not in self.rewards else [r for r in self.rewards if r is not None]
        return sum(known) / len(known) if known else None  # type: ignore[arg-type]


def _number(reward: Any, key: str | None) -> float | None:
    value = reward.get(key) if isinstance(reward, dict) and key else reward
    try:
        return float(value) if isinstance(value, (int, float, np.generic)) else None
    except (ValueError, TypeError, OverflowError):  # a text of numpy, a whole number beyond all floats
        return None


def write_answers(connection: sqlite3.Connection, rollout: int, answers: Answers) -> int | None:
    """Adds the groups of a rollout's row with their answers, and returns the checksum of these."""
    entries, samples, rewards = answers.entries, answers.samples, answers.rewards
    if not entries:
        return checksum_of((), (), (), ())
    counts = [len(entry.samples) for entry in entries]
    groups = _next_rows(connection, "groups", len(entries))
    rows = _next_rows(connection, "samples", len(samples))  # as SQLite numbers what comes next
    ends = list(itertools.accumulate(counts, initial=0))
    of_groups = [
        _group_row(entry, rewards[begin:end])
        for entry, (begin, end) in zip(entries, itertools.pairwise(ends), strict=True)
    ]
    about = dict(zip(_OF_GROUP, zip(*of_groups, strict=True), strict=True))
    insert_columns(connection, "groups", about, {"rollout": rollout})
    numbers, values = Columns(*answers.values[: len(Columns._fields)]), answers.values[len(Columns._fields) :]
    *plain, _, status, response, failure, reward = values
    columns: dict[str, Sequence[Any]] = {
        "group_row": list(itertools.chain.from_iterable(map(itertools.repeat, groups, counts))),
        "reward": rewards,
        "response": [text if text.isascii() else storable(text) for text in response],
    }
    rare: dict[str, Sequence[Any]] = dict(zip(_AS_THEY_ARE.values(), plain, strict=True))
    if dict in set(map(type, reward)):
        rare["reward_parts"] = [_json(value) if isinstance(value, dict) else None for value in reward]
    rare["failure"] = failure
    if any(failure):
        rare["failure"] = [value and _failure(value) for value in failure]
    packed = pack_groups(numbers, counts)
    if packed is None:
        alone = list(map(pack_alone, samples))
        rare |= dict(
            zip(("tokens", "log_probs", "loss_mask", "versions"), zip(*alone, strict=True), strict=True)
        )
        numbers_as_bytes = in_columns(alone)
    else:
        numbers_as_bytes = [payload for _, payload in packed]
        connection.executemany(
            "INSERT INTO numbers_of_answers VALUES (?, ?)",
            [(rows[place], payload) for place, payload in packed],
        )
    same = {}
    if status.count(status[0]) == len(status):  # of most rollouts
        same["status"] = status[0]._value_
    else:
        columns["status"] = [value._value_ for value in status]
    insert_columns(connection, "samples", columns | rare, same)
    if rows[-1] >= MANY_SAMPLES:
        index_orders(connection)
    return checksum_of(numbers_as_bytes, numbers.response_length, rewards, columns["response"])


def _next_rows(connection: sqlite3.Connection, table: str, count: int) -> range:
    """So many numbers behind those of the rows that a table has."""
    [(last,)] = connection.execute(f"SELECT coalesce(max(id), 0) FROM {table}")
    return range(last + 1, last + 1 + count)


def _group_row(entry: Entry, found: Sequence[float | None]) -> tuple[Any, ...]:
    """What its samples have in common."""
    first = entry.samples[0]
    rewards = [reward for reward in found if reward is not None]
    prompt, label = storable(prompt_text(first.prompt)), first.label
    return (
        entry.dataset,
        first.group_index,
        prompt,
        prompt_hash(prompt),
        None if label is None else storable(label if isinstance(label, str) else _json(label)),
        entry.outcome,
        None if entry.reason is None else storable(str(entry.reason)),
        max(rewards) - min(rewards) if len(rewards) > 1 else None,
    )


def _failure(failure: RewardFailure) -> str:
    return storable(f"{failure.kind}: {failure.reason}")


def _json(value: object) -> str:
    return storable(any_json(_encode, value))
