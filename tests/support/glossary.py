"""Holds what a run logged against the glossary of metrics (docs/metrics.md)."""

import json
from collections import Counter
from pathlib import Path

from slime.catalog.metrics import find_metric


def unknown_metrics(run: Path) -> list[str]:
    """Names in RUN/metrics.jsonl that the glossary does not have; a line being written is left out."""
    path = run / "metrics.jsonl"
    names: dict[str, None] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.endswith("}"):
            names |= dict.fromkeys(json.loads(line))
    return [name for name in names if find_metric(name) is None]


def repeated_rewards(run: Path) -> list[tuple[int, int]]:
    """(Start, step) of rewards that RUN/metrics.jsonl has twice."""
    path = run / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    rows = [row for row in map(json.loads, lines) if "rollout/raw_reward" in row]
    counts = Counter((row.get("start", 1), row["step"]) for row in rows)
    return [place for place, count in counts.items() if count > 1]


def assert_in_glossary(run: Path) -> None:
    assert not repeated_rewards(run), "one reward for one step"
    assert not unknown_metrics(run), f"add rows to slime/catalog/metrics.py for {unknown_metrics(run)}"
