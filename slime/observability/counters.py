"""Fills in zeros of counters: an event that did not occur in a step is logged as 0, not left out."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.arguments import Args
from slime.catalog.metrics import find_metric
from slime.observability.tracking import read_metrics

# Metrics whose value is 0 where they are not reported.
_COUNTERS = frozenset(
    [
        "rollout/zero_std/count_<reward>",
        "rollout/groups/failed",
        "rollout/groups/stale",
        "rollout/groups/reward_<kind>",
        "rollout/groups/of_one",
        "rollout/dynamic_filter/drop_<reason>",
        "rollout/reward_failure/<kind>",
        "rollout/answers_not_compared",
        "rollout/error_cat/<category>",
        "rollout/staleness/<lag>",
        "rollout/<kind>/skipped_<reason>",
        "train/staleness/<lag>",
        "train/empty_steps",
        "train/nonfinite_steps",
        "train/critic-empty_steps",
        "train/critic-nonfinite_steps",
        "eval/<dataset>-failed",
        "eval/<dataset>/reward_failures",
    ]
)
# Counters of every run, by kind of row: their curves start at the first step.
_ALWAYS = {
    "rollout": ("rollout/answers_not_compared", "rollout/groups/of_one"),
    "train": ("train/empty_steps", "train/nonfinite_steps"),
    "eval": (),
}


class Counters:
    """Adds zeros for counters that were reported before and are missing from a row.

    Trackers and plots draw a line from one value to the next: without the zeros between them a count of 3 in
    step 2 and in step 9 looks like a count of 3 in all steps. `reported`: names that earlier starts logged.
    """

    def __init__(self, reported: Iterable[str] = ()):
        self._known = {name for name in reported if is_counter(name)}

    @classmethod
    def of_run(cls, folder: Path, start: int, args: Args) -> Counters:
        """Return the counters of a run that starts at rollout `start`, with those of earlier rollouts.

        Rows of later rollouts come from a start that was killed; they are repeated, and must come out the
        same as in a run that was not killed.
        """

        def is_before(row: Mapping[str, Any]) -> bool:
            steps = {"rollout/step": 1, "train/step": args.num_steps_per_rollout or 1, "eval/step": 1}
            return any(name in row and row[name] // each < start for name, each in steps.items())

        return cls({name for row in read_metrics(folder) if is_before(row) for name in row})

    def fill(self, metrics: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """Return the metrics with zeros added. `kind`: rollout, train or eval. Empty metrics stay empty."""
        if not metrics:
            return {}
        self._known |= {name for name in metrics if is_counter(name)}
        names = {name for name in self._known if name.startswith(f"{kind}/")} | {*_ALWAYS[kind]}
        return {**metrics, **{name: 0 for name in sorted(names) if name not in metrics}}


@functools.lru_cache(maxsize=4096)
def is_counter(name: str) -> bool:
    """Return whether a metric counts as 0 where it is not reported."""
    row = find_metric(name)
    return row is not None and row.name in _COUNTERS
