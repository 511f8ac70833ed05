"""The dashboard's queries: samples in any order, one sample by tokens, the history of a prompt.

Every query follows an index and ends after `_DEADLINE_S`: where a filter finds little, the dashboard gets
what was found so far and the place to continue from.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.record.additions import read_advantage
from slime.record.images import read_images
from slime.record.reader import conditions
from slime.record.samples import read_tokens

_DEADLINE_S = 0.08
_LOOK_STEPS = 2000  # instructions of SQLite between two checks of the deadline
_PREVIEW = 240  # characters
_MAX_PAGE = 500
_JOINED = "samples s JOIN groups g ON g.id = s.group_row JOIN rollouts r ON r.id = g.rollout"
_ROW = (
    "s.id, r.kind, r.rollout_id, g.dataset, g.group_index, s.sample_index, s.status, s.reward, s.num_tokens, "
    f"g.outcome, g.reason, substr(g.prompt, 1, {_PREVIEW}), substr(s.response, 1, {_PREVIEW}), g.id, "
    "g.label, s.failure"
)
_FIELDS = (
    *("id", "kind", "step", "dataset", "group", "sample", "status", "reward", "length", "outcome", "reason"),
    *("prompt", "response", "group_row", "label", "failure"),
)
# Order -> column and direction; the number of the sample decides between equals.
ORDERS = {
    "made": ("s.id", "ASC"),
    "newest": ("s.id", "DESC"),
    "worst": ("s.reward", "ASC"),
    "best": ("s.reward", "DESC"),
    "shortest": ("s.num_tokens", "ASC"),
    "longest": ("s.num_tokens", "DESC"),
    "difference": ("g.spread", "DESC"),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Selects the samples to show; None: no condition. Example: Wanted("train", 12, order="worst")."""

    kind: str | None = None
    step: int | None = None
    dataset: str | None = None
    outcome: str | None = None
    contains: str | None = None
    order: str = "made"

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wanted:
        """Read the query of a request; ValueError for an unknown order."""
        order = query.get("order") or "made"
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; there are {', '.join(ORDERS)}")
        step = query.get("step")
        return cls(
            query.get("kind") or None,
            int(step) if step not in (None, "") else None,
            query.get("dataset") or None,
            query.get("outcome") or None,
            query.get("q") or None,
            order,
        )

    @property
    def filters(self) -> bool:
        return any(value is not None for value in (self.dataset, self.outcome, self.contains))

    def conditions(self) -> tuple[list[str], list[object]]:
        equal = {
            "r.kind": self.kind,
            "r.rollout_id": self.step,
            "g.dataset": self.dataset,
            "g.outcome": self.outcome,
        }
        return conditions(equal, self.contains, None if self.order == "made" else ORDERS[self.order][0])


def steps_of(connection: sqlite3.Connection, kind: str) -> list[dict[str, Any]]:
    """Return one entry for each rollout or evaluation with samples, oldest first."""
    rows = connection.execute(
        "SELECT rollout_id, num_groups, num_samples, mean_reward, time, version, pruned FROM rollouts "
        "WHERE kind = ? ORDER BY rollout_id",
        (kind,),
    )
    names = ("step", "groups", "samples", "reward", "time", "version", "pruned")
    return [dict(zip(names, row, strict=True)) for row in rows]


class Positions:
    """Positions of each rollout's first sample in the list of all; rebuilt when rollouts are added."""

    def __init__(self) -> None:
        self._made: dict[str | None, tuple[tuple[Any, ...], list[int], list[int]]] = {}

    def find(self, connection: sqlite3.Connection, kind: str | None) -> tuple[list[int], list[int]]:
        """Return rows of rollouts, oldest first, and the cumulative number of samples."""
        where, values = ("WHERE kind = ?", (kind,)) if kind else ("", ())
        state = connection.execute(
            f"SELECT count(*), max(id), sum(pruned), sum(num_samples) FROM rollouts {where}", values
        ).fetchone()
        known = self._made.get(kind)
        if known is None or known[0] != state:
            rows = connection.execute(
                f"SELECT id, CASE WHEN pruned THEN 0 ELSE num_samples END FROM rollouts {where} "
                "ORDER BY time, id",
                values,
            ).fetchall()
            ends = list(itertools.accumulate(count for _, count in rows))
            known = self._made[kind] = (state, [row for row, _ in rows], ends)
        return known[1], known[2]


def page(
    connection: sqlite3.Connection,
    wanted: Wanted,
    positions: Positions,
    *,
    offset: int = 0,
    limit: int = 100,
    after: str = "",
) -> dict[str, Any]:
    """Return one page of samples. `total` None: not counted; `after`: where the next page starts, or ""."""
    limit = max(1, min(limit, _MAX_PAGE))
    if wanted.step is None and not wanted.filters and wanted.order in ("made", "newest"):
        return _by_position(connection, wanted, positions, offset, limit)
    if wanted.step is not None:
        return _of_step(connection, wanted, offset, limit)
    return _in_order(connection, wanted, limit, after)


def _by_position(
    connection: sqlite3.Connection, wanted: Wanted, positions: Positions, offset: int, limit: int
) -> dict[str, Any]:
    """Return a page of all samples; the sizes of rollouts locate a position."""
    rows, ends = positions.find(connection, wanted.kind)
    total = ends[-1] if ends else 0
    newest = wanted.order == "newest"
    found: list[tuple[Any, ...]] = []
    while len(found) < limit and offset + len(found) < total:
        place = offset + len(found)
        # Rollouts are in reverse order, the samples of each in the order they were made.
        at = bisect_right(ends, total - 1 - place if newest else place)
        begin = ends[at - 1] if at else 0
        skipped = place - (total - ends[at]) if newest else place - begin
        part = connection.execute(
            f"SELECT {_ROW} FROM {_JOINED} WHERE r.id = ? ORDER BY s.id LIMIT ? OFFSET ?",
            (rows[at], limit - len(found), skipped),
        ).fetchall()
        if not part:
            break  # these samples are being removed
        found += part
    return {"rows": _as_rows(found), "total": total, "after": ""}


def _of_step(connection: sqlite3.Connection, wanted: Wanted, offset: int, limit: int) -> dict[str, Any]:
    words, values = wanted.conditions()
    where = " AND ".join(words)
    column, direction = ORDERS[wanted.order]
    query = f"SELECT {_ROW} FROM {_JOINED} WHERE {where} ORDER BY {column} {direction}, s.id LIMIT ? OFFSET ?"
    rows = connection.execute(query, (*values, limit, offset)).fetchall()
    [(total,)] = connection.execute(f"SELECT count(*) FROM {_JOINED} WHERE {where}", values)
    return {"rows": _as_rows(rows), "total": total, "after": ""}


def _in_order(connection: sqlite3.Connection, wanted: Wanted, limit: int, after: str) -> dict[str, Any]:
    """Return a page in index order, starting after the last page, until it is full or time is up."""
    column, direction = ORDERS[wanted.order]
    words, values = wanted.conditions()
    by_group = column == "g.spread"
    # Equals come in the direction of the order, as they lie in the index.
    ties = f"g.id {direction}, s.id" if by_group else f"s.id {direction}"
    order = ties if column == "s.id" else f"{column} {direction}, {ties}"
    # CROSS JOIN keeps the table whose index is followed outermost.
    tables = "samples s CROSS JOIN groups g ON g.id = s.group_row"
    if by_group:
        tables = "groups g CROSS JOIN samples s ON s.group_row = g.id"
    deadline, complete = time.monotonic() + _DEADLINE_S, True
    found: list[tuple[Any, ...]] = []
    for condition, bound in _stages(column, ">" if direction == "ASC" else "<", after):
        where = " AND ".join([*words, condition])
        query = (
            f"SELECT {_ROW}, {column} FROM {tables} CROSS JOIN rollouts r ON r.id = g.rollout "
            f"WHERE {where} ORDER BY {order} LIMIT ?"
        )
        part, complete = _until(connection, query, (*values, *bound, limit - len(found)), deadline)
        found += part
        if len(found) == limit or not complete:
            break
    next_after = after if not complete else ""  # nothing found in time: continue from the same place
    if found and (len(found) == limit or not complete):
        last = dict(zip(_FIELDS, found[-1], strict=False))
        next_after = json.dumps([found[-1][-1], last["group_row"], last["id"]])
    rows = _as_rows([row[:-1] for row in found])
    return {"rows": rows, "total": None, "after": next_after, "complete": complete}


def _stages(column: str, sign: str, after: str) -> list[tuple[str, tuple[object, ...]]]:
    """Yield the conditions for rows after a position: ties of its value first, then the rest."""
    if not after:
        return [("1", ())]
    value, group, row = json.loads(after)
    if column == "s.id":
        return [(f"s.id {sign} ?", (row,))]
    if column == "g.spread":
        return [
            ("g.id = ? AND s.id > ?", (group, row)),
            (f"g.spread = ? AND g.id {sign} ?", (value, group)),
            (f"g.spread {sign} ?", (value,)),
        ]
    return [(f"{column} = ? AND s.id {sign} ?", (value, row)), (f"{column} {sign} ?", (value,))]


def search(connection: sqlite3.Connection, wanted: Wanted, limit: int, below: int | None) -> dict[str, Any]:
    """Search text in the record, newest first, in chunks of rows until time is up."""
    [(newest,)] = connection.execute("SELECT coalesce(max(id), 0) FROM samples")
    high = newest + 1 if below is None else below
    words, values = Wanted(
        wanted.kind, wanted.step, wanted.dataset, wanted.outcome, wanted.contains
    ).conditions()
    found: list[tuple[Any, ...]] = []
    started = time.monotonic()
    stretch = 1000
    while high > 0 and len(found) < limit and time.monotonic() - started < _DEADLINE_S:
        low = max(0, high - stretch)
        where = " AND ".join(["s.id >= ?", "s.id < ?", *words])
        query = f"SELECT {_ROW} FROM {_JOINED} WHERE {where} ORDER BY s.id DESC LIMIT ?"
        part = connection.execute(query, (low, high, *values, limit - len(found))).fetchall()
        found += part
        high = part[-1][0] if len(found) >= limit else low
    return {
        "rows": _as_rows(found),
        "total": None,
        "after": str(high) if high > 0 else "",
        "searched": 1.0 - high / (newest + 1),
    }


def _until(
    connection: sqlite3.Connection, query: str, values: tuple[object, ...], deadline: float
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return what a query finds before the deadline, and whether it is complete."""
    rows: list[tuple[Any, ...]] = []
    connection.set_progress_handler(lambda: int(time.monotonic() > deadline), _LOOK_STEPS)
    try:
        for row in connection.execute(query, values):
            rows.append(row)
        return rows, True
    except sqlite3.OperationalError as error:
        if "interrupt" not in str(error):
            raise
        return rows, False
    finally:
        connection.set_progress_handler(None, 0)


def one(connection: sqlite3.Connection, row: int) -> dict[str, Any] | None:
    """Return a sample with its tokens: text, log-prob, mask, weight version and advantage of each."""
    found = connection.execute(
        f"SELECT {_ROW}, g.prompt, s.response, s.reward_parts, g.prompt_hash, r.version "
        f"FROM {_JOINED} WHERE s.id = ?",
        (row,),
    ).fetchone()
    if found is None:
        return None
    answer = dict(zip(_FIELDS, found[: len(_FIELDS)], strict=True))
    prompt, response, parts, prompt_hash, version = found[len(_FIELDS) :]
    tokens = read_tokens(connection, row)
    ids, advantage = tokens.ids, read_advantage(connection, row)
    length = min(answer["length"], len(ids))
    return {
        **answer,
        "prompt": prompt,
        "response": response,
        "reward_parts": json.loads(parts) if parts else {},
        "prompt_hash": str(prompt_hash),  # JavaScript's numbers do not hold 64 bits
        "version": version,
        "num_prompt_tokens": len(ids) - length,
        "tokens": ids[len(ids) - length :],
        "prompt_tokens": ids[: len(ids) - length],
        "texts": _texts(connection, ids),
        "log_probs": tokens.log_probs,
        "mask": tokens.loss_mask,
        "versions": tokens.versions,
        "advantage": None if advantage is None else {"value": advantage.value, "tokens": advantage.tokens},
        "images": read_images(connection, answer["group_row"], row),
        "turns": tokens.turns,
        "episode": _episode(connection, answer["group_row"], tokens.execution) if tokens.turns else [],
        "siblings": _siblings(connection, answer["group_row"]),
    }


def _episode(connection: sqlite3.Connection, group_row: int, execution: int | None) -> list[dict[str, Any]]:
    """Return the samples of one episode, which is one sample for each branch of its tree of turns."""
    rows = connection.execute(
        "SELECT id, reward FROM samples WHERE group_row = ? AND execution = ? ORDER BY id LIMIT 64",
        (group_row, execution),
    )
    return [
        {"id": row, "reward": reward, "turns": read_tokens(connection, row).turns} for row, reward in rows
    ]


def _texts(connection: sqlite3.Connection, ids: list[int]) -> dict[int, str]:
    """Return the text of every token id that the record has text for."""
    texts: dict[int, str] = {}
    distinct = sorted(set(ids))
    for start in range(0, len(distinct), 500):
        part = distinct[start : start + 500]
        marks = ",".join("?" * len(part))
        texts.update(connection.execute(f"SELECT token, text FROM pieces WHERE token IN ({marks})", part))
    return texts


def _siblings(connection: sqlite3.Connection, group_row: int) -> list[dict[str, Any]]:
    rows = connection.execute(
        "SELECT id, reward, num_tokens, status FROM samples WHERE group_row = ? ORDER BY id LIMIT 256",
        (group_row,),
    )
    return [dict(zip(("id", "reward", "length", "status"), row, strict=True)) for row in rows]


def history(connection: sqlite3.Connection, prompt_hash: int, limit: int = 200) -> list[dict[str, Any]]:
    """Return the groups of one prompt, oldest first: mean reward and one response of each."""
    rows = connection.execute(
        "SELECT r.kind, r.rollout_id, g.dataset, g.outcome, count(*), avg(s.reward), max(s.reward), "
        "min(s.id), avg(s.num_tokens), r.version FROM groups g JOIN rollouts r ON r.id = g.rollout "
        "JOIN samples s ON s.group_row = g.id WHERE g.prompt_hash = ? GROUP BY g.id "
        "ORDER BY r.time, r.id LIMIT ?",
        (prompt_hash, limit),
    ).fetchall()
    names = ("kind", "step", "dataset", "outcome", "samples", "reward", "best", "id", "length", "version")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    if found:  # the prompt is the same in all of them
        [(found[0]["prompt"],)] = connection.execute(
            "SELECT g.prompt FROM samples s JOIN groups g ON g.id = s.group_row WHERE s.id = ?",
            (found[0]["id"],),
        )
    for entry in found:
        [(entry["response"],)] = connection.execute(
            "SELECT response FROM samples WHERE id = ?", (entry["id"],)
        )
    return found


def repeated_prompts(connection: sqlite3.Connection, kind: str, limit: int = 100) -> list[dict[str, Any]]:
    """Return prompts of the last rollout or evaluation, by the rise of their mean reward since their first
    occurrence.
    """
    mean = "(SELECT avg(s.reward) FROM samples s WHERE s.group_row = {})"
    first = "(SELECT min(b.id) FROM groups b WHERE b.prompt_hash = g.prompt_hash AND b.dataset IS g.dataset)"
    rows = connection.execute(
        "SELECT g.prompt_hash, substr(g.prompt, 1, 160), g.dataset, (SELECT count(*) FROM groups b "
        f"WHERE b.prompt_hash = g.prompt_hash) AS seen, {mean.format(first)}, {mean.format('g.id')} "
        "FROM groups g WHERE g.rollout = ("
        "SELECT id FROM rollouts WHERE kind = ? AND NOT pruned ORDER BY rollout_id DESC LIMIT 1) "
        "ORDER BY g.id LIMIT ?",
        (kind, limit),
    )
    names = ("prompt_hash", "prompt", "dataset", "seen", "before", "after")
    found = [dict(zip(names, (str(row[0]), *row[1:]), strict=True)) for row in rows]
    return sorted(found, key=lambda row: (row["before"] or 0.0) - (row["after"] or 0.0))


def outcomes(connection: sqlite3.Connection, width: int = 400) -> list[dict[str, Any]]:
    """Count the groups of the last rollouts by outcome and reason."""
    rows = connection.execute(
        "SELECT g.outcome, g.reason, count(*) FROM groups g JOIN rollouts r ON r.id = g.rollout "
        "WHERE r.kind = 'train' AND r.id IN (SELECT id FROM rollouts WHERE kind = 'train' "
        "ORDER BY rollout_id DESC LIMIT ?) GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 50",
        (width,),
    )
    return [dict(zip(("outcome", "reason", "groups"), row, strict=True)) for row in rows]


def _as_rows(rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [dict(zip(_FIELDS, row, strict=True)) for row in rows]
