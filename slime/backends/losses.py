"""The losses of a run, put together from `slime.algorithms`: policy loss, SFT loss and a user's own.

Each returns sums over a micro-batch; the backend divides by the denominators of the whole optimizer step.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.advantages import get_estimator
from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.policy_loss import compute_cispo_loss, compute_policy_loss, sequence_kl
from slime.algorithms.reduce import Reducer, token_weights, weighted_sum
from slime.algorithms.sft_loss import compute_sft_loss
from slime.backends.base import Loss, Metrics, MicroBatch, TokenOutputs
from slime.backends.microbatch import split_by_sample
from slime.utils.misc import load_function
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)


def build_loss(args: Any, batch: RolloutBatch) -> Loss:
    """The loss that `--loss-type` names, over the given batch (custom losses see its per-sample lists)."""
    if args.loss_type == "policy_loss":
        return Loss(_policy_loss(args), needs_entropy=True)
    if args.loss_type == "sft_loss":
        return Loss(_sft_loss(args))
    if args.loss_type == "custom_loss":
        logger.warning(
            "--loss-type custom_loss: full fp32 logits [tokens, vocabulary] are materialised for each micro-batch; keep "
            "--max-tokens-per-gpu small."
        )
        return Loss(_custom_loss(args, batch), needs_logits=True)
    raise ValueError(f"--loss-type is {args.loss_type!r}: choose policy_loss, sft_loss or custom_loss.")


def _reducer(args: Any, mb: MicroBatch) -> Reducer:
    weights = token_weights(mb.loss_mask, mb.segments, mb.rollout_mask_sums, per_token=args.calculate_per_token_loss)
    return lambda values: weighted_sum(values, weights)


def _pg_reducer(args: Any, mb: MicroBatch, default: Reducer) -> Reducer:
    """The reducer of the policy-gradient term alone, which a plug-in may replace."""
    if not args.custom_pg_loss_reducer_function_path or not mb.positions:
        return default
    build = load_function(args.custom_pg_loss_reducer_function_path)
    masks = split_by_sample(mb.loss_mask, mb)
    return build(list(mb.documents.lengths), list(mb.response_lengths), masks, args.calculate_per_token_loss)


def _policy_terms(args: Any, out: TokenOutputs, mb: MicroBatch, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token policy loss, clip indicator and ppo_kl by the estimator's kind of loss."""
    kind = get_estimator(args.advantage_estimator).loss
    eps_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    advantages = mb.tokens["advantages"]
    ppo_kl = old - out.log_probs
    if kind == "gspo":
        ppo_kl = sequence_kl(ppo_kl, mb.loss_mask, mb.segments, mb.num_samples)
    if kind == "cispo":
        loss, clipped = compute_cispo_loss(ppo_kl, out.log_probs, advantages, args.eps_clip, eps_high)
    else:
        loss, clipped = compute_policy_loss(ppo_kl, advantages, args.eps_clip, eps_high, args.eps_clip_c)
    return loss, clipped, ppo_kl


def _policy_loss(args: Any) -> Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Metrics]]:
    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        reduce = _reducer(args, mb)
        # Without recorded old log-probs this is the first and only step on its policy: the ratio is exactly 1.
        old = mb.tokens.get("old_log_probs", out.log_probs.detach())
        per_token, clipped, ppo_kl = _policy_terms(args, out, mb, old)
        pg_loss = _pg_reducer(args, mb, reduce)(per_token)
        entropy = reduce(out.entropy)
        loss = pg_loss
        if args.entropy_coef:
            loss = loss - args.entropy_coef * entropy
        metrics = {
            "pg_loss": pg_loss,
            "entropy_loss": entropy,
            "pg_clipfrac": reduce(clipped),
            "ppo_kl": reduce(ppo_kl),
        }
        metrics["ois"] = reduce(torch.exp(-ppo_kl))
        if args.use_kl_loss:
            ratio = torch.exp(-ppo_kl) if args.use_unbiased_kl else None
            kl = reduce(compute_approx_kl(out.log_probs, mb.tokens["ref_log_probs"], args.kl_loss_type, ratio))
            loss = loss + args.kl_loss_coef * kl
            metrics["kl_loss"] = kl
        if "rollout_log_probs" in mb.tokens:
            trained = mb.tokens.get("log_probs", out.log_probs.detach())
            metrics["train_rollout_logprob_abs_diff"] = reduce((trained - mb.tokens["rollout_log_probs"]).abs())
        metrics["loss"] = loss
        return loss, {name: value.detach() for name, value in metrics.items()}

    return loss_fn


def _sft_loss(args: Any) -> Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Metrics]]:
    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        loss = _reducer(args, mb)(compute_sft_loss(out.log_probs))
        return loss, {"loss": loss.detach()}

    return loss_fn


def _custom_loss(args: Any, batch: RolloutBatch) -> Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Metrics]]:
    function = load_function(args.custom_loss_function_path)

    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        if not mb.positions:
            return out.logits.sum() * 0.0, {}
        loss, metrics = function(args, micro_batch_dict(batch, mb), out.logits, _reducer(args, mb))
        return loss, {"loss": loss.detach(), **{name: torch.as_tensor(v).detach() for name, v in metrics.items()}}

    return loss_fn


def micro_batch_dict(batch: RolloutBatch, mb: MicroBatch) -> dict[str, Any]:
    """What a custom loss receives: the packed stream, its boundaries and every per-sample list of these samples."""
    device = mb.input_ids.device
    num_samples = len(batch["tokens"])
    view: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, list) and len(value) == num_samples:
            chosen = [value[p] for p in mb.positions]
            view[key] = [x.to(device) if isinstance(x, Tensor) else x for x in chosen]
    view["unconcat_tokens"] = view.pop("tokens")
    view["tokens"] = mb.input_ids
    view["total_lengths"] = list(mb.documents.lengths)
    view["cu_seqlens"] = mb.documents.cu_seqlens
    view["max_seqlen"] = mb.documents.longest
    return view
