"""Defines the report of a training step, `StepReport`, and computes its numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.backends.base import StepStats
from slime.backends.shared.trainer_base import TrainBackend
from slime.batch.split import RankStep
from slime.utils.types import RolloutBatch, SampleKey, TokenKey, is_score

PER_TOKEN_METRICS: tuple[TokenKey, ...] = (
    *("log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs"),
    *("returns", "advantages", "values", "entropy", "kl", "opd_reverse_kl"),
)
PER_SAMPLE_METRICS: tuple[SampleKey, ...] = ("rewards", "raw_reward", "truncated", "response_lengths")
# Parts of the loss are reported as they are minimised; other metrics are means over trained tokens.
LOSS_TERMS = ("loss", "pg_loss", "kl_loss")
RATED_PASSES = ("log_probs", "ref_log_probs", "actor_train")  # of which TFLOP/s are reported
STEPS_NOT_APPLIED = ("nonfinite_steps", "empty_steps", "skipped_steps")


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of training on one batch, the same on all ranks.

    Example: StepReport({"rollout/rewards": 0.25}, [{"train/loss": 0.2}, {"train/loss": 0.1}], []) of two
    optimizer steps: the loss of its `summary` is their mean, 0.15, and there are no hints.
    """

    metrics: dict[str, float]  # rollout/* and perf/*, of the batch as a whole
    steps: list[dict[str, float]]  # train/*, of each optimizer step in order
    hints: list[str]  # new hints for users, each logged once per run

    @property
    def summary(self) -> dict[str, float]:
        """Return all metrics; those of the optimizer steps as `mean_over_steps`."""
        return mean_over_steps(self.steps) | self.metrics


def mean_over_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the steps that have it; steps that were not applied are counted."""
    means = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        means[name] = sum(values) / (1 if name.endswith(STEPS_NOT_APPLIED) else len(values))
    return means


def step_metrics(stats: StepStats, step: RankStep) -> dict[str, float]:
    """Return the metrics of one optimizer step of the policy."""
    # Rollouts without a trained token count in the loss's denominator, but not in means about the policy.
    counted = stats.metrics.get("_counted") or 1.0
    metrics = {
        f"train/{name}": value if name in LOSS_TERMS or name.startswith("moe_") else value / counted
        for name, value in stats.metrics.items()
        if not name.startswith("_")
    }
    if stats.metrics.get("_ratio_square"):
        # (sum w)^2 / (n sum w^2): the effective share of the sampled tokens.
        metrics["train/ess"] = stats.metrics["_ratio"] ** 2 / (
            stats.metrics["_ratio_square"] * stats.metrics["_ratio_count"]
        )
    metrics |= optimizer_metrics(stats, "train/")
    metrics["train/global_batch_size"] = step.num_rollouts
    metrics["perf/optimizer_time"] = stats.optimizer_s
    return metrics


def optimizer_metrics(stats: StepStats, prefix: str) -> dict[str, float]:
    """Return gradient norm, learning rates, and whether there was nothing to apply."""
    metrics = {f"{prefix}grad_norm": stats.grad_norm}
    metrics |= {f"{prefix}lr-pg_{i}": rate for i, rate in enumerate(stats.learning_rates)}
    if stats.loss_scale is not None:
        metrics[f"{prefix}loss_scale"] = stats.loss_scale
    name = "skipped" if stats.overflowed else "empty"
    return metrics if stats.applied else metrics | {f"{prefix}{name}_steps": 1.0}


def rollout_metrics(
    backend: TrainBackend, batch: RolloutBatch, *, with_rewards: bool = True, of_correct: bool = False
) -> dict[str, float]:
    """Return means over all ranks: of token values over rollouts with trained tokens, of others over samples.

    `of_correct`: also the entropy over tokens of responses with reward 1, if it was recorded.
    """
    weights = _weights_in_rollouts(batch["loss_masks"], batch["rollout_mask_sums"])
    sums = {"samples": float(len(batch["tokens"])), "trained": float(weights.sum())}
    for key in PER_TOKEN_METRICS:
        if key in batch:
            sums[key] = float((_joined(batch[key]) * weights).sum())
    for name in PER_SAMPLE_METRICS:
        if name in batch and (with_rewards or name not in ("rewards", "raw_reward")):
            sums[name] = float(sum(value for value in batch[name] if is_score(value)))
    sums["total_lengths"] = float(sum(len(tokens) for tokens in batch["tokens"]))
    totals = backend.sum_over_ranks(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
    total = dict(zip(sums, totals, strict=True))
    samples, trained = max(total.pop("samples"), 1.0), total.pop("trained") or 1.0
    counts = {key: trained if key in PER_TOKEN_METRICS else samples for key in total}
    metrics = {f"rollout/{key}": value / counts[key] for key, value in total.items()}
    if of_correct and "entropy" in batch:
        metrics |= _correct_entropy(backend, batch)
    if "values" in batch and "returns" in batch:
        metrics["rollout/explained_variance"] = explained_variance(backend, batch)
    return metrics


def _correct_entropy(backend: TrainBackend, batch: RolloutBatch) -> dict[str, float]:
    sums = torch.zeros(2, dtype=torch.float64)
    for entropy, mask, reward in zip(
        batch["entropy"], batch["loss_masks"], batch.get("raw_reward", batch["rewards"]), strict=True
    ):
        if reward == 1:
            sums += torch.stack([(entropy.double() * mask).sum(), mask.double().sum()])
    total, count = backend.sum_over_ranks(sums).tolist()
    return {"rollout/correct_entropy": total / count} if count else {}


def _weights_in_rollouts(masks: Sequence[Tensor], mask_sums: Sequence[float]) -> Tensor:
    """Return [R] weights, fp64, with which a sum of token values is the sum of the rollouts' means."""
    lengths = torch.tensor([mask.numel() for mask in masks], dtype=torch.int64)
    shares = torch.tensor(mask_sums, dtype=torch.float64).clamp(min=1.0)
    return _joined(masks) / torch.repeat_interleave(shares, lengths)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Return [R] of all tokens, fp64; converted in one piece, which is faster than row by row."""
    return torch.cat([*rows]).double() if rows else torch.zeros(0, dtype=torch.float64)


def explained_variance(backend: TrainBackend, batch: RolloutBatch) -> float:
    """Return the share of the returns' variance that the critic's values explain; 0 for a constant."""
    sums = torch.zeros(5, dtype=torch.float64)
    for values, returns, mask in zip(batch["values"], batch["returns"], batch["loss_masks"], strict=True):
        chosen = mask != 0
        truth, error = returns[chosen].double(), (returns - values)[chosen].double()
        count = torch.tensor(float(len(truth)))
        sums += torch.stack([count, truth.sum(), truth.square().sum(), error.sum(), error.square().sum()])
    count, total, squares, errors, error_squares = backend.sum_over_ranks(sums).tolist()
    count = max(count, 1.0)
    variance = squares / count - (total / count) ** 2
    return 1.0 - (error_squares / count - (errors / count) ** 2) / variance if variance > 1e-12 else 0.0


def perf_metrics(
    backend: TrainBackend, batch: RolloutBatch, seconds: dict[str, float], flops: dict[str, float]
) -> dict[str, float]:
    """Return seconds by phase, and the trainer's rates; `flops`: this rank's operations in each pass."""
    metrics = {f"perf/{name}_time": value for name, value in seconds.items()}
    tokens = float(sum(len(tokens) for tokens in batch["tokens"]))
    work = torch.tensor([tokens, *flops.values()], dtype=torch.float64)
    tokens, *done = backend.sum_over_ranks(work).tolist()
    metrics["perf/actor_train_tok_per_s"] = tokens / max(seconds["actor_train"], 1e-9)
    for name, total in zip(flops, done, strict=True):
        per_rank = total / backend.layout.dp_size
        metrics[f"perf/{name}_tflops"] = per_rank / max(seconds[name], 1e-9) / 1e12
    return metrics
