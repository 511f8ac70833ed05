"""What stands beside the policy in a training step: the critic's values and update, the teacher's opinion."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from slime.algorithms.distillation import sampled_reverse_kl, subtract_reverse_kl
from slime.arguments import Args
from slime.backends.base import (
    Denominators,
    HeadFunction,
    Loss,
    Metrics,
    MicroBatch,
    OutputMatrix,
    TokenOutputs,
    TrainBackend,
)
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.schedule import RankStep
from slime.step.critic_loss import build_value_loss
from slime.step.policy import loss_reducer, mean_reducer
from slime.step.watch import TokenWatch
from slime.utils.types import RolloutBatch


def train_critic(
    backend: TrainBackend, args: Args, batch: RolloutBatch, step: RankStep, watch: TokenWatch
) -> dict[str, float]:
    """One optimizer step of the critic towards the returns; its metrics are `train/critic-*`."""
    mbs = build_micro_batches(batch, step.micro_batches, ["values", "returns"])
    per = "tokens" if args.calculate_per_token_loss else "rollouts"
    denominators = Denominators(step.num_rollouts, step.num_tokens, step.num_samples, per=per)
    stats = backend.train_step(mbs, build_value_loss(args, watch), denominators, model="critic")
    metrics = {f"train/critic-{name}": value for name, value in stats.metrics.items()}
    metrics["train/critic-grad_norm"] = stats.grad_norm
    if not stats.applied:
        metrics["train/critic-empty_steps"] = 1.0
    for i, rate in enumerate(stats.learning_rates):
        metrics[f"train/critic-lr-pg_{i}"] = rate
    return metrics


def explained_variance(backend: TrainBackend, batch: RolloutBatch) -> float:
    """How much of the returns' variance over trained tokens the values
    explain: 1 is all of it, 0 what a constant does.
    """
    sums = torch.zeros(5, dtype=torch.float64)
    for values, returns, mask in zip(batch["values"], batch["returns"], batch["loss_masks"], strict=True):
        chosen = mask != 0
        truth, error = returns[chosen].double(), (returns - values)[chosen].double()
        sums += torch.stack(
            [
                torch.tensor(float(len(truth))),
                truth.sum(),
                truth.square().sum(),
                error.sum(),
                error.square().sum(),
            ]
        )
    count, total, squares, errors, error_squares = backend.sum_over_ranks(sums).tolist()
    count = max(count, 1.0)
    variance = squares / count - (total / count) ** 2
    return 1.0 - (error_squares / count - (errors / count) ** 2) / variance if variance > 1e-12 else 0.0


def wants_full_kl(args: Args) -> bool:
    return args.use_opd and args.opd_kl == "full"


def add_teacher(
    backend: TrainBackend, args: Args, mbs: list[MicroBatch], batch: RolloutBatch
) -> dict[str, float]:
    """Add `teacher_log_probs` (and the hidden states that the full KL needs); returns seconds by pass."""
    if args.opd_type != "trainer":
        if "teacher_log_probs" not in batch:
            raise ValueError(
                "--opd-type engine: the samples carry no teacher_log_probs; score them with --custom-rm-path "
                "slime.rollout.on_policy_distillation.reward_func and --rm-url of the teacher, or set them "
                "in the rollout."
            )
        return {}
    started = time.perf_counter()
    at_head = (lambda hidden, matrix, mb: hidden) if wants_full_kl(args) else None
    result = backend.log_probs(mbs, weights="teacher", at_head=at_head)
    batch["teacher_log_probs"] = result.log_probs
    if result.extra is not None:
        batch["teacher_hidden"] = result.extra
    return {"teacher_log_probs": time.perf_counter() - started}


def add_reverse_kl(args: Args, batch: RolloutBatch, student: list[Tensor] | None) -> None:
    """Record `opd_reverse_kl` and, unless the KL is a loss of its own, subtract it from the advantages."""
    assert student is not None, "distillation needs the policy's log-probs of its samples"
    batch["opd_reverse_kl"] = sampled_reverse_kl(student, batch["teacher_log_probs"])
    if not wants_full_kl(args):
        batch["advantages"] = subtract_reverse_kl(
            batch["advantages"], batch["opd_reverse_kl"], args.opd_kl_coef
        )


def with_distillation(loss: Loss, backend: TrainBackend, args: Args) -> Loss:
    """The loss that also reports the reverse KL to the teacher and,
    where the full KL is asked for, adds it.
    """
    full = wants_full_kl(args)

    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        value, metrics = loss.fn(out, mb)
        if not full:
            return value, metrics | {"opd_reverse_kl": mean_reducer(args, mb)(mb.tokens["opd_reverse_kl"])}
        kl = loss_reducer(args, mb)(out.extra)
        value = value + args.opd_kl_coef * kl
        reported = {"opd_reverse_kl": mean_reducer(args, mb)(out.extra.detach()), "loss": value.detach()}
        return value, metrics | reported

    return replace(loss, fn=loss_fn, at_head=_full_kl_at_head(backend, args) if full else None)


def _full_kl_at_head(backend: TrainBackend, args: Args) -> HeadFunction:
    """KL(policy || teacher) over the vocabulary at each response token;
    needs `teacher_hidden` among the tokens.
    """
    teacher = backend.output_matrix("teacher")

    def at_head(hidden: Tensor, matrix: OutputMatrix, mb: MicroBatch) -> Tensor:
        if not mb.positions:
            return hidden.sum(-1).float() + 0.0 * matrix.weight[0, 0]
        return matrix.reverse_kl(
            hidden,
            mb.tokens["teacher_hidden"],
            teacher,
            temperature=args.rollout_temperature,
            chunk_size=args.log_probs_chunk_size,
        )

    return at_head
