"""On-policy distillation in a training step: log-probs of the teacher, and the KL to it."""

from dataclasses import replace

from torch import Tensor

from slime.algorithms.distillation import sampled_reverse_kl, subtract_reverse_kl, top_kl
from slime.arguments import Flags
from slime.arguments.groups.objectives import TOP_KLS
from slime.backends.base import (
    HeadFunction,
    Loss,
    Metrics,
    MicroBatch,
    OutputMatrix,
    TokenOutputs,
)
from slime.backends.shared.trainer_base import TrainBackend
from slime.step.policy import loss_reducer, mean_reducer
from slime.utils.types import RolloutBatch


def wants_full_kl(args: Flags) -> bool:
    return args.use_opd and args.opd_kl == "full"


def require_teacher_log_probs(args: Flags, batch: RolloutBatch) -> None:
    """Raise if log-probs of the teacher are missing, which the rollout requests from a teacher engine."""
    name = "teacher_top_ids" if args.opd_kl in TOP_KLS else "teacher_log_probs"
    if name not in batch:
        raise ValueError(
            f"--opd-type engine: the samples carry no {name}; score them with --custom-rm-path "
            "slime.rollout.on_policy_distillation.reward_func and --rm-url of the teacher, or set them "
            "in the rollout."
        )


def add_teacher(backend: TrainBackend, mbs: list[MicroBatch], batch: RolloutBatch, *, full_kl: bool) -> None:
    """Add `teacher_log_probs` by a pass of the teacher, and the hidden states that the full KL needs."""
    at_head: HeadFunction | None = (lambda hidden, matrix, mb: hidden) if full_kl else None
    result = backend.log_probs(mbs, weights="teacher", at_head=at_head)
    batch["teacher_log_probs"] = result.log_probs
    if result.extra is not None:
        batch["teacher_hidden"] = result.extra


def add_reverse_kl(args: Flags, batch: RolloutBatch, student: list[Tensor] | None) -> None:
    """Record `opd_reverse_kl` and, unless the KL is a loss of its own, subtract it from the advantages."""
    assert student is not None, "distillation needs the policy's log-probs of its samples"
    reverse_kl = batch["opd_reverse_kl"] = sampled_reverse_kl(student, batch["teacher_log_probs"])
    if args.opd_kl == "sampled":
        batch["advantages"] = subtract_reverse_kl(batch["advantages"], reverse_kl, args.opd_kl_coef)


def with_distillation(loss: Loss, backend: TrainBackend, args: Flags) -> Loss:
    """Return the loss that also reports the KL to the teacher, and adds it unless it is in the advantages."""

    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        value, metrics = loss.fn(out, mb)
        if args.opd_kl == "sampled":
            return value, metrics | {"opd_reverse_kl": mean_reducer(args, mb)(mb.tokens["opd_reverse_kl"])}
        assert out.extra is not None, "this KL is computed at the head"
        value = value + args.opd_kl_coef * loss_reducer(args, mb)(out.extra)
        name = "opd_forward_kl" if args.opd_kl == "forward_top_k" else "opd_reverse_kl"
        reported = {name: mean_reducer(args, mb)(out.extra.detach()), "loss": value.detach()}
        return value, metrics | reported

    at_head = None
    if args.opd_kl != "sampled":
        at_head = _full_kl_at_head(backend, args) if wants_full_kl(args) else _top_kl_at_head(args)
    return replace(loss, fn=loss_fn, at_head=at_head)


def _top_kl_at_head(args: Flags) -> HeadFunction:
    """KL between policy and teacher on the teacher's most likely ids at each response token."""

    def at_head(hidden: Tensor, matrix: OutputMatrix, mb: MicroBatch) -> Tensor:
        if not mb.positions:
            return hidden.sum(-1).float() + 0.0 * matrix.weight[0, 0]
        ids, teacher = mb.tokens["teacher_top_ids"].long(), mb.tokens["teacher_top_log_probs"]
        chunk_size, temperature = args.log_probs_chunk_size, args.rollout_temperature
        student = matrix.log_probs_of(hidden, ids, temperature=temperature, chunk_size=chunk_size)
        return top_kl(student, teacher, forward=args.opd_kl == "forward_top_k")

    return at_head


def _full_kl_at_head(backend: TrainBackend, args: Flags) -> HeadFunction:
    """KL(policy || teacher) over the vocabulary at each response token; tokens have `teacher_hidden`."""
    teacher = backend.output_matrix("teacher")

    def at_head(hidden: Tensor, matrix: OutputMatrix, mb: MicroBatch) -> Tensor:
        if not mb.positions:
            return hidden.sum(-1).float() + 0.0 * matrix.weight[0, 0]
        assert teacher is not None, "a rank with the policy's head has the teacher's"
        return matrix.reverse_kl(
            hidden,
            mb.tokens["teacher_hidden"],
            teacher,
            temperature=args.rollout_temperature,
            chunk_size=args.log_probs_chunk_size,
        )

    return at_head
