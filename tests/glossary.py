"""Holds what a run logged against the glossary of metrics (docs/metrics.md)."""

import json
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


def assert_in_glossary(run: Path) -> None:
    assert not unknown_metrics(run), f"add rows to slime/catalog/metrics.py for {unknown_metrics(run)}"
