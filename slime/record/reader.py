"""Reads a run's record: rollouts, samples by any condition, and one prompt in two steps."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime.record.additions import Advantage, read_advantage
from slime.record.place import record_file
from slime.record.samples import Tokens, checksum, read_tokens
from slime.record.schema import Reader
from slime.record.texts import prompt_hash

_COLUMNS = (
    "r.kind, r.rollout_id, g.dataset, g.group_index, g.prompt, g.label, g.outcome, g.reason, "
    "s.sample_index, s.status, s.reward, s.reward_parts, s.failure, s.response, s.num_tokens, s.id"
)
_MOST = (1 << 63) - 1  # integers that SQLite can store
Kind = Literal["train", "eval"]  # of a rollout
_JOINED = "samples s JOIN groups g ON g.id = s.group_row JOIN rollouts r ON r.id = g.rollout"


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """One sample as it is shown to people.

    Example: RecordedSample("train", 12, None, 3, "2+2=", "4", "trained", None, 25, "completed", 1.0, {},
    None, "4<|im_end|>", 2, 77).
    """

    kind: str
    rollout_id: int
    dataset: str | None
    group_index: int | None
    prompt: str
    label: str | None
    outcome: str
    reason: str | None
    sample_index: int | None
    status: str
    reward: float | None
    reward_parts: dict[str, Any]
    failure: str | None
    response: str
    num_tokens: int
    row: int


@dataclass(frozen=True, slots=True)
class Select:
    """Selects samples that meet all conditions; None is no condition. The newest rollouts come first."""

    kind: Kind | None = None
    rollout_id: int | None = None
    dataset: str | None = None
    outcome: str | None = None
    contains: str | None = None  # in the prompt, the response or the label; case does not count
    order: Literal["made", "worst", "best"] = "made"
    limit: int = 20


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A rollout or an evaluation as a whole. `pruned`: its samples were removed for their size or age."""

    kind: Kind
    rollout_id: int
    time: float
    version: str | None
    num_groups: int
    num_samples: int
    mean_reward: float | None
    pruned: bool


class Record(Reader):
    """A reader of the samples of one record."""

    def _read_samples(self, query: str, values: Sequence[object]) -> list[RecordedSample]:
        rows = self._ask(query, values)
        with self._reading():
            return [_recorded_sample(row) for row in rows]

    def rollouts(self, since: float = 0.0) -> list[RolloutRow]:
        """Return every rollout and evaluation that ended after a time, oldest first."""
        rows = self._ask(
            "SELECT kind, rollout_id, time, version, num_groups, num_samples, mean_reward, pruned "
            "FROM rollouts WHERE time > ? ORDER BY time, id",
            (since,),
        )
        return [RolloutRow(*row) for row in rows]

    def changed(self) -> list[tuple[Kind, int]]:
        """Return rollouts and evaluations whose groups or samples differ from what was written."""
        rows = self._ask(
            "SELECT kind, rollout_id, id, num_groups, num_samples, checksum FROM rollouts "
            "WHERE NOT pruned ORDER BY id"
        )
        return [(kind, number) for kind, number, row, *about in rows if self._is_changed(row, *about)]

    def _is_changed(self, row: int, num_groups: int, num_samples: int, stored: int | None) -> bool:
        there = self._ask(
            "SELECT count(DISTINCT g.id), count(s.id) FROM groups g "
            "LEFT JOIN samples s ON s.group_row = g.id WHERE g.rollout = ?",
            (row,),
        )
        if there != [(num_groups, num_samples)]:
            return True
        with self._reading():
            return stored is not None and checksum(self._connection, row) != stored

    def datasets(self, kind: str, rollout_id: int) -> list[str | None]:
        """Return the names of the datasets of an evaluation; for a rollout, which has no name, [None]."""
        rows = self._ask(
            "SELECT g.dataset FROM groups g JOIN rollouts r ON r.id = g.rollout "
            "WHERE r.kind = ? AND r.rollout_id = ? GROUP BY g.dataset ORDER BY min(g.id)",
            (kind, rollout_id),
        )
        return [name for (name,) in rows]

    def samples(self, select: Select) -> list[RecordedSample]:
        """Return at most `select.limit` samples. An order by reward leaves out samples without a reward."""
        step = select.rollout_id
        equal = {
            "r.kind": select.kind,
            "r.rollout_id": None if step is None else max(-1, min(step, _MOST)),
            "g.dataset": select.dataset,
            "g.outcome": select.outcome,
        }
        words, values = conditions(equal, select.contains, None if select.order == "made" else "s.reward")
        where = " AND ".join(words) or "1"
        order = {
            "made": "r.time DESC, r.id DESC, g.group_index, s.sample_index",
            "worst": "s.reward, s.id",
            "best": "s.reward DESC, s.id",
        }[select.order]
        query = f"SELECT {_COLUMNS} FROM {_JOINED} WHERE {where} ORDER BY {order} LIMIT ?"
        return self._read_samples(query, (*values, select.limit))

    answers = samples  # its former name, which scripts of users call

    def tokens(self, row: int) -> Tokens:
        """Return the tokens of the sample with this `row`."""
        with self._reading():
            return read_tokens(self._connection, row)

    def advantage(self, row: int) -> Advantage | None:
        """Return the advantage of the sample with this `row`; None: it is not in the record."""
        with self._reading():
            return read_advantage(self._connection, row)

    def prompts_of_both(self, kind: str, early: int, late: int, limit: int) -> list[str]:
        """Return prompts that two rollouts (or evaluations) share, in the order of the first one."""
        rows = self._ask(
            "SELECT DISTINCT a.prompt FROM groups a JOIN rollouts ra ON ra.id = a.rollout "
            "WHERE ra.kind = ?1 AND ra.rollout_id = ?2 AND EXISTS ("
            "SELECT 1 FROM groups b JOIN rollouts rb ON rb.id = b.rollout "
            "WHERE rb.kind = ?1 AND rb.rollout_id = ?3 AND b.prompt_hash = a.prompt_hash) "
            "ORDER BY a.id LIMIT ?4",
            (kind, early, late, limit),
        )
        return [prompt for (prompt,) in rows]

    def samples_of_prompt(self, kind: str, rollout_id: int, prompt: str) -> list[RecordedSample]:
        """Return all samples of a prompt in one rollout or evaluation."""
        query = (
            f"SELECT {_COLUMNS} FROM {_JOINED} WHERE r.kind = ? AND r.rollout_id = ? AND g.prompt_hash = ? "
            "ORDER BY s.sample_index"
        )
        return self._read_samples(query, (kind, rollout_id, prompt_hash(prompt)))


def open_record(run_dir: str | Path) -> Record:
    """Open the record in the folder of a run. RecordError: there is none; the message says why."""
    return Record(record_file(Path(run_dir)))


def conditions(
    equal: Mapping[str, object], contains: str | None, known: str | None
) -> tuple[list[str], list[object]]:
    """Return the conditions of a query for samples, and their values; None is no condition.

    `equal`: columns and their values. `contains`: a text in prompt, response or label. `known`: a column that
    is not NULL.
    """
    words = [f"{column} = ?" for column, value in equal.items() if value is not None]
    values: list[object] = [value for value in equal.values() if value is not None]
    if contains is not None:
        words.append("(instr(lower(g.prompt), ?) OR instr(lower(s.response), ?) OR instr(lower(g.label), ?))")
        values += [contains.lower()] * 3
    if known is not None:
        words.append(f"{known} IS NOT NULL")
    return words, values


def _recorded_sample(row: sqlite3.Row | tuple[Any, ...]) -> RecordedSample:
    values = list(row)
    values[10], values[14] = None if values[10] is None else float(values[10]), int(values[14])
    values[11] = json.loads(values[11]) if values[11] else {}
    return RecordedSample(*values)
