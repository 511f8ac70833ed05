"""Limits on counts: the rows of `--limits NAME=NUMBER,...`."""

from typing import Any

from slime.catalog.named_numbers import NamedNumber

LIMITS: dict[str, NamedNumber] = {
    "group-attempts": NamedNumber(3, "times one group is generated: when it failed, or is too stale", ge=1),
    "reward-retries": NamedNumber(2, "retries of a reward that failed", ge=0),
    "reward-failures": NamedNumber(32, "consecutive samples without a reward before the run stops", ge=1),
    "reward-workers": NamedNumber(1, "processes that check responses", ge=1),
    "judge-requests": NamedNumber(16, "concurrent judgements", ge=1),
    "judge-tokens": NamedNumber(512, "tokens of one response of the judge", ge=1),
    "sandboxes": NamedNumber(32, "concurrent local sandboxes", ge=1),
    "engine-restarts": NamedNumber(3, "engine deaths within ten minutes; one more stops the run", ge=0),
    "probe-failures": NamedNumber(
        1, "failed --use-fault-tolerance probes before an engine is replaced", ge=1
    ),
    "embedded-requests": NamedNumber(1024, "requests that one embedded engine decodes together", ge=1),
    "embedded-tokens": NamedNumber(0, "tokens of KV cache of one embedded engine; 0: what fits", ge=0),
    "tracker-samples": NamedNumber(16, "samples of each rollout that trackers show", ge=0, le=1000),
}


def limit(args: Any, name: str) -> int:
    """Return a limit of the run."""
    return int(args.limits.get(name, LIMITS[name].default))
