"""Histograms over the steps of a run: of samples, of groups and of trained tokens; and pass@k.

A long run has more samples than can be read for one request. Steps are visited from coarse to fine, with some
groups of each, until all are read or the time is over; the result names how much of the run it covers.
"""

import itertools
import sqlite3
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.observability.rollout_metrics import pass_rates
from slime.record.additions import BINS, read_histogram
from slime.record.samples import read_tokens
from slime.utils.types import version_number

_DEADLINE_S = 0.06  # of this thread's CPU time: a busy machine shows as much as an idle one
_LONGEST_S = 0.25  # however busy the machine is
_SHARE_OF_VALUES = 0.6  # of the deadline; the rest is for token versions, which are slower to read
_STEPS, _GROUPS, _VERSIONS = 64, 24, 4  # at most: of a run; of a step; samples of a step
_BINS = 20
_HARDEST = 12


@dataclass(slots=True)
class _Step:
    """What was read of one rollout or evaluation."""

    row: int
    step: int
    version: str | None
    values: dict[str, list[float]] = field(default_factory=dict)
    groups: dict[int, list[float]] = field(default_factory=dict)  # rewards by the row of the group


def distributions(connection: sqlite3.Connection, kind: str, dataset: str | None) -> dict[str, Any]:
    """Return one histogram per metric with a column for each step that was read, pass@k and hard prompts."""
    started, began = time.thread_time(), time.monotonic()

    def is_late(share: float) -> bool:
        waited = time.monotonic() - began
        return time.thread_time() - started > share * _DEADLINE_S or waited > share * _LONGEST_S

    read: list[_Step] = []
    [(of_steps, first, last)] = connection.execute(
        "SELECT count(*), min(rollout_id), max(rollout_id) FROM rollouts WHERE kind = ?", (kind,)
    )
    for wanted in _coarse_to_fine(first, last) if of_steps else ():
        if read and is_late(_SHARE_OF_VALUES):
            break
        found = connection.execute(
            "SELECT id, rollout_id, version, num_groups FROM rollouts WHERE kind = ? AND rollout_id >= ? "
            "AND NOT pruned ORDER BY rollout_id LIMIT 1",
            (kind, wanted),
        ).fetchone()
        if found is not None and all(step.row != found[0] for step in read):
            read.append(_read_step(connection, _Step(*found[:3]), found[3], dataset))
    for step in read:
        if is_late(1.0):
            break
        step.values["staleness"] = list(_staleness(connection, step))
    read = sorted((step for step in read if step.groups), key=lambda step: step.step)
    rates = [pass_rates(rewards for rewards in step.groups.values() if rewards) for step in read]
    names = ("reward", "length", "advantage", "staleness", "difficulty")
    histograms = {name: _histogram([step.values.get(name, []) for step in read]) for name in names}
    for name, (low, high, bins) in BINS.items() if kind == "train" and read else ():
        counts = np.array(read_histogram(connection, name, [step.step for step in read]))
        used = np.flatnonzero(counts.sum(axis=0))
        if len(used):  # without the empty bins at both ends
            edges = np.linspace(low, high, bins + 1)
            sums, part = counts @ ((edges[1:] + edges[:-1]) / 2), slice(used[0], used[-1] + 1)
            histograms[name] = _as_json(edges[used[0] : used[-1] + 2], counts[:, part], sums)
    return {
        "steps": [step.step for step in read],
        "of_steps": of_steps,
        "samples": sum(len(step.values.get("length", ())) for step in read),
        "histograms": {name: histogram for name, histogram in histograms.items() if histogram is not None},
        "pass_rates": {name: [r.get(name) for r in rates] for name in dict.fromkeys(itertools.chain(*rates))},
        "hardest": _hardest(connection, read[-3:]),
        "datasets": _datasets(connection),
    }


def _coarse_to_fine(first: int, last: int) -> Iterator[int]:
    """Yield at most `_STEPS` numbers at equal distances: the last one first, then ever finer parts."""
    places = sorted({round(place) for place in np.linspace(first, last, _STEPS)}, reverse=True)
    seen = set[int]()
    for stride in (16, 8, 4, 2, 1):
        for place in places[::stride]:
            if place not in seen:
                seen.add(place)
                yield place


def _read_step(connection: sqlite3.Connection, step: _Step, num_groups: int, dataset: str | None) -> _Step:
    """Read the numbers of some groups, at equal distances: groups of one outcome are neighbours."""
    rows = connection.execute(
        "SELECT g.id, s.reward, s.num_tokens, a.value FROM groups g JOIN samples s ON s.group_row = g.id "
        "LEFT JOIN advantages a ON a.sample = s.id WHERE g.rollout = ? AND g.id % ? = 0 "
        "AND (? IS NULL OR g.dataset = ?)",
        (step.row, max(1, num_groups // _GROUPS), dataset, dataset),
    )
    values: dict[str, list[float]] = {"reward": [], "length": [], "advantage": []}
    for group, *numbers in rows:
        rewards = step.groups.setdefault(group, [])
        if numbers[0] is not None:
            rewards.append(numbers[0])
        for name, number in zip(values, numbers, strict=True):
            if number is not None:
                values[name].append(number)
    values["difficulty"] = [statistics.fmean(rewards) for rewards in step.groups.values() if rewards]
    step.values = values
    return step


def _staleness(connection: sqlite3.Connection, step: _Step) -> Iterator[float]:
    """Yield how many weight syncs older than the step's weights the oldest token of some samples is."""
    current = version_number(step.version)
    if current is None:
        return
    for group in list(step.groups)[:: max(1, len(step.groups) // _VERSIONS)]:
        [(row,)] = connection.execute("SELECT min(id) FROM samples WHERE group_row = ?", (group,))
        versions = [version_number(version) for version, _, _ in read_tokens(connection, row).versions]
        known = [version for version in versions if version is not None]
        if known:
            yield float(max(0, current - min(known)))


def _histogram(columns: Sequence[Sequence[float]]) -> Mapping[str, Any] | None:
    """Return edges that all steps share, and the number of values in each bin and the mean of each step."""
    values = np.asarray([value for column in columns for value in column], float)
    steps = np.repeat(np.arange(len(columns)), [len(column) for column in columns])
    values, steps = values[np.isfinite(values)], steps[np.isfinite(values)]
    if not len(values) or not np.isfinite(np.ptp(values)):
        return None
    low, high = values.min(), values.max()
    edges = np.linspace(low, high, _BINS + 1) if high > low else np.array([low - 0.5, low + 0.5])
    bins = len(edges) - 1
    places = np.minimum(np.searchsorted(edges, values, "right") - 1, bins - 1)
    counts = np.bincount(steps * bins + places, minlength=len(columns) * bins).reshape(-1, bins)
    return _as_json(edges, counts, np.bincount(steps, values, len(columns)))


def _as_json(edges: np.ndarray, counts: np.ndarray, sums: np.ndarray) -> Mapping[str, Any]:
    sizes = counts.sum(axis=1)
    means = [float(total / size) if size else None for total, size in zip(sums, sizes, strict=True)]
    return {"edges": edges.tolist(), "counts": counts.tolist(), "means": means}


def _hardest(connection: sqlite3.Connection, steps: Sequence[_Step]) -> list[dict[str, Any]]:
    """Return the prompts of the last steps with the lowest mean reward."""
    means = {group: statistics.fmean(r) for step in steps for group, r in step.groups.items() if r}
    found: dict[str, dict[str, Any]] = {}
    for group in sorted(means, key=lambda group: means[group])[: 2 * _HARDEST]:
        [(prompt_hash, prompt)] = connection.execute(
            "SELECT prompt_hash, substr(prompt, 1, 160) FROM groups WHERE id = ?", (group,)
        )
        found.setdefault(str(prompt_hash), {"prompt": prompt, "reward": means[group]})
    return [{"prompt_hash": key, **entry} for key, entry in list(found.items())[:_HARDEST]]


def _datasets(connection: sqlite3.Connection) -> list[str]:
    """Return the names of the datasets of the last evaluation."""
    rows = connection.execute(
        "SELECT DISTINCT dataset FROM groups WHERE dataset IS NOT NULL AND rollout = "
        "(SELECT id FROM rollouts WHERE kind = 'eval' AND NOT pruned ORDER BY rollout_id DESC LIMIT 1) "
        "ORDER BY 1"
    )
    return [name for (name,) in rows]
