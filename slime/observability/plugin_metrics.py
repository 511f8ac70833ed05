"""Metric functions with the names and signatures of THUDM/slime, for plug-ins."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from slime.catalog.estimators import ESTIMATORS
from slime.observability.rollout_metrics import (
    distribution,
    has_repetition,
    pass_rates,
    perf_metrics,
    sample_metrics,
    zero_std_counts,
)
from slime.utils.misc import group_by
from slime.utils.types import Sample, flatten_samples

__all__ = [
    "RolloutStep",
    "compression_ratio",
    "compute_metrics_from_samples",
    "compute_pass_rate",
    "compute_perf_metrics_from_samples",
    "compute_rollout_step",
    "compute_statistics",
    "dict_add_prefix",
    "has_repetition",
]

_COMPRESSORS: dict[str, Callable[[bytes, int], bytes]] = {
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "lzma": lambda data, level: lzma.compress(data, preset=level),
}


class RolloutStep(int):
    """A rollout's number in optimizer steps. Trackers count rollouts and convert the axis themselves."""

    rollout_id: int


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Add a prefix to each key: `({"mean": 1}, "len/")` -> `{"len/mean": 1}`."""
    return {f"{prefix}{key}": value for key, value in d.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median, maximum and minimum."""
    return distribution(list(values))


def compute_pass_rate(
    flat_rewards: Sequence[float],
    group_size: int,
    num_groups: int | None = None,
    group_ids: Sequence[Hashable] | None = None,
) -> dict[str, float]:
    """Return pass@1, pass@2, pass@4, ... up to the group size, as means over groups with enough samples.

    Rewards lie group after group; with `group_ids`, each reward names its group, and groups may differ in
    size. A reward of 1 is correct.
    """
    if group_size == 1:
        return {}
    if group_ids is None:
        expected = group_size * (len(flat_rewards) // group_size if num_groups is None else num_groups)
        if len(flat_rewards) != expected:
            raise ValueError(
                f"compute_pass_rate: {len(flat_rewards)} rewards are not whole groups of {group_size}; give "
                "group_ids if groups differ in size."
            )
        group_ids = [position // group_size for position in range(expected)]
    groups = group_by(zip(group_ids, flat_rewards, strict=True), key=lambda pair: pair[0])
    return pass_rates([[reward for _, reward in pairs] for pairs in groups.values()], group_size)


def compression_ratio(
    data: str | bytes, *, encoding: str = "utf-8", algorithm: str = "zlib", level: int = 9
) -> tuple[float, float]:
    """Return the compression ratio and the saving in percent; (inf, 0) for empty data."""
    if algorithm not in _COMPRESSORS:
        raise ValueError(f"compression_ratio: algorithm is {algorithm!r}; choose {', '.join(_COMPRESSORS)}.")
    raw = data.encode(encoding) if isinstance(data, str) else data
    if not raw:
        return float("inf"), 0.0
    size = len(_COMPRESSORS[algorithm](raw, level))
    return len(raw) / size, 100.0 * (1.0 - size / len(raw))


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """Return a rollout's x-value: its id, or with --wandb-always-use-train-step its optimizer steps."""
    if not getattr(args, "wandb_always_use_train_step", False):
        return rollout_id
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    step = RolloutStep(rollout_id * samples // args.global_batch_size)
    step.rollout_id = rollout_id
    return step


def compute_metrics_from_samples(args: Any, samples: Sequence[Sample]) -> dict[str, float]:
    """Return lengths, truncation, repetition and groups of equal rewards, without a prefix."""
    flat = flatten_samples(samples)
    metrics = sample_metrics(flat, getattr(args, "log_reward_category", None))
    row = ESTIMATORS.get(getattr(args, "advantage_estimator", "grpo"))
    if row is None or not row.needs_values:  # a critic compares with its own values
        metrics |= zero_std_counts(flat, getattr(args, "reward_key", None))
    return metrics


def compute_perf_metrics_from_samples(
    args: Any, samples: Sequence[Sample], rollout_time: float
) -> dict[str, float]:
    """Return generation time, tokens per second and other waits, without a prefix."""
    num_gpus = max(1, getattr(args, "rollout_num_gpus", None) or 1)
    return perf_metrics(flatten_samples(samples), rollout_time, num_gpus=num_gpus)
