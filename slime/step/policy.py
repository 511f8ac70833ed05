"""The policy loss of a micro-batch: ratios, off-policy correction, entropy and KL terms, their metrics."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.off_policy import (
    TokenLayout,
    importance_ratios,
    importance_weights,
    mismatch_metrics,
    opsm_keep,
    rejection,
)
from slime.algorithms.policy_loss import PolicyInputs, PolicyOptions, PolicyTerms, compute_policy_terms
from slime.algorithms.ratios import beyond_bound, exp_ratio
from slime.algorithms.reduce import Reducer, reduction_weights, weighted_sum
from slime.arguments import Flags
from slime.backends.base import TOKENS_LEFT, Metrics, MicroBatch, TokenOutputs
from slime.backends.shared.microbatch import split_by_sample
from slime.catalog.policy_losses import policy_loss_arg
from slime.step.token_terms import TokenWatch
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call

TokenMetrics = dict[str, Tensor]  # each [R], to be averaged over trained tokens
LossFunction = Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class Corrected:
    """Per token: the policy loss after weights and rejection, and the mask of a plug-in."""

    loss: Tensor  # [R]
    metrics: TokenMetrics
    mask: Tensor | None = None  # [R] times the loss mask, for policy, KL and entropy terms; None: all of it


def policy_loss(args: Flags, watch: TokenWatch) -> LossFunction:
    """Return the loss function of --loss-type policy_loss; `watch` gets the per-token terms."""
    own = ("sapo_tau_pos", "sapo_tau_neg", "dppo_delta")
    options = PolicyOptions(
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip if args.eps_clip_high is None else args.eps_clip_high,
        eps_clip_c=args.eps_clip_c,
        **{name: policy_loss_arg(args, name) for name in own},
    )

    def loss_fn(out: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Metrics]:
        assert out.entropy is not None, "the policy loss asks for it"
        inputs = _inputs(out, mb)
        terms, token_metrics = _policy_terms(args, inputs, options)
        corrected = _correct(args, terms, inputs, mb)
        token_metrics |= corrected.metrics
        reduce, mean = loss_reducer(args, mb, corrected.mask), mean_reducer(args, mb)
        pg_loss = _pg_reducer(args, mb, reduce, corrected.mask)(corrected.loss)
        loss = pg_loss
        if args.entropy_coef:
            loss = loss - args.entropy_coef * reduce(out.entropy)
        sums = {"pg_loss": pg_loss}
        watched = {name: getattr(inputs, name) for name in ("log_probs", "old_log_probs", "advantages")}
        watched |= {"pg_loss": corrected.loss, "ppo_kl": terms.ppo_kl, "entropy": out.entropy}
        if args.use_kl_loss:
            watched["kl"] = _reference_kl(args, inputs, mb)
            kl = reduce(watched["kl"])
            loss = loss + args.kl_loss_coef * kl
            sums["kl_loss"] = kl
        token_metrics |= {
            "entropy_loss": out.entropy,
            "pg_clipfrac": terms.clipped,
            "ppo_kl": terms.ppo_kl,
            "ppo_kl_abs": terms.ppo_kl.abs(),
            "ois": exp_ratio(-terms.ppo_kl),
            "ratio_bounded": beyond_bound(terms.ppo_kl),
        }
        watch.record(mb, watched)
        sums |= {name: mean(values.detach()) for name, values in token_metrics.items()}
        sums["_counted"] = mean(torch.ones_like(terms.ppo_kl.detach()))
        left_out = (terms.loss != 0) & (corrected.loss == 0)
        sums[TOKENS_LEFT] = ((mb.loss_mask != 0) & ~left_out).sum().to(pg_loss.dtype)
        sums["loss"] = loss
        return loss, {name: value.detach() for name, value in sums.items()}

    return loss_fn


def loss_reducer(args: Flags, mb: MicroBatch, mask: Tensor | None = None) -> Reducer:
    """Return a function: flat per-token values -> the sum that --loss-reduction asks for.

    `mask` [R] leaves tokens out of that sum; its divisor still counts all trained tokens.
    """
    per_rollout, constant = mb.rollout_mask_sums, args.rollout_max_response_len
    weights = reduction_weights(
        args.loss_reduction, mb.loss_mask, mb.segments, per_rollout, constant=constant
    )
    weights = weights if mask is None else weights * mask
    return lambda values: weighted_sum(values, weights)


def mean_reducer(args: Flags, mb: MicroBatch) -> Reducer:
    """Like `loss_reducer`, but always a mean over the step, even if the reduction's divisor is constant."""
    reduction = "rollout_mean" if args.loss_reduction == "constant" else args.loss_reduction
    weights = reduction_weights(reduction, mb.loss_mask, mb.segments, mb.rollout_mask_sums)
    return lambda values: weighted_sum(values, weights)


def _pg_reducer(args: Flags, mb: MicroBatch, default: Reducer, mask: Tensor | None) -> Reducer:
    """Return the reducer of the policy-gradient term alone, which a plug-in may replace."""
    path = args.custom_pg_loss_reducer_function_path
    if not path or not mb.positions:
        return default
    masks = split_by_sample(mb.loss_mask if mask is None else mb.loss_mask * mask, mb)
    with plugin_call("--custom-pg-loss-reducer-function-path", path):
        reducer: Reducer = load_function(path)(
            list(mb.documents.lengths), list(mb.response_lengths), masks, args.calculate_per_token_loss
        )
        return reducer


def _trained(mb: MicroBatch, key: str, log_probs: Tensor) -> Tensor:
    """Return recorded values of trained tokens, and the current log-prob elsewhere: no ratio overflows."""
    if key not in mb.tokens:
        return log_probs.detach()
    return torch.where(mb.loss_mask != 0, mb.tokens[key], log_probs.detach())


def _inputs(out: TokenOutputs, mb: MicroBatch) -> PolicyInputs:
    return PolicyInputs(
        log_probs=out.log_probs,
        # Without recorded old log-probs this is the only step on its policy: the ratio is exactly 1.
        old_log_probs=_trained(mb, "old_log_probs", out.log_probs),
        advantages=mb.tokens["advantages"],
        mask=mb.loss_mask,
        segments=mb.segments,
        num_samples=mb.num_samples,
    )


def _policy_terms(
    args: Flags, inputs: PolicyInputs, options: PolicyOptions
) -> tuple[PolicyTerms, TokenMetrics]:
    path = args.custom_policy_loss_function_path
    if path is None:
        return compute_policy_terms(args.policy_loss_type, inputs, options), {}
    with plugin_call("--custom-policy-loss-function-path", path):
        loss, metrics = load_function(path)(args, inputs)
    if loss.shape != inputs.log_probs.shape:
        raise ValueError(
            f"--custom-policy-loss-function-path {path} returned a loss of shape "
            f"{tuple(loss.shape)} for {len(inputs.log_probs)} response tokens: return one value per token."
        )
    ppo_kl = inputs.old_log_probs - inputs.log_probs
    return PolicyTerms(loss, torch.zeros_like(ppo_kl), ppo_kl), dict(metrics)


def _correct(args: Flags, terms: PolicyTerms, inputs: PolicyInputs, mb: MicroBatch) -> Corrected:
    """Apply weights and rejection; add metrics of the distance to the engine's policy."""
    loss, mask = terms.loss, None
    metrics: TokenMetrics = {}
    if args.use_opsm:
        ppo_kl, tokens = inputs.old_log_probs - inputs.log_probs, (inputs.mask, inputs.segments)
        keep = opsm_keep(ppo_kl, inputs.advantages, *tokens, inputs.num_samples, delta=args.opsm_delta)
        loss, metrics["opsm_clipfrac"] = loss * keep, 1.0 - keep
    if "rollout_log_probs" not in mb.tokens:
        return Corrected(loss, metrics)
    behaviour = _trained(mb, "rollout_log_probs", inputs.log_probs)
    proximal = _trained(mb, "log_probs", inputs.log_probs)
    layout = TokenLayout(inputs.mask, inputs.segments, inputs.num_samples)
    ratio = importance_ratios(proximal - behaviour, layout, "token")
    metrics |= {
        "train_rollout_logprob_abs_diff": (proximal - behaviour).abs(),
        # Three means from which the effective sample size of the whole step follows.
        "_ratio": ratio,
        "_ratio_square": ratio.square(),
        "_ratio_count": torch.ones_like(ratio),
    }
    if args.custom_tis_function_path and (args.use_tis or args.get_mismatch_metrics):
        custom = _custom_tis(args, args.custom_tis_function_path, loss, proximal, behaviour, mb)
        if args.use_tis:
            loss, mask = custom.loss, custom.mask
        metrics |= custom.metrics
    elif args.use_tis:
        bounds = {"low": args.tis_clip_low, "high": args.tis_clip}
        correction = importance_weights(
            proximal - behaviour, layout, level=args.tis_level, mode=args.tis_mode, **bounds
        )
        metrics |= correction.metrics | {"tis_weight": correction.weights}
        loss = loss * correction.weights
    if args.use_rs and not args.custom_tis_function_path:  # the plug-in reads the switch itself
        level, low, high = args.rs_level, args.rs_lower, args.rs_upper
        correction = rejection(
            proximal - behaviour, layout, level=level, low=low, high=high, veto=args.rs_veto
        )
        loss = torch.where(correction.keep != 0, loss, torch.zeros_like(loss))
        metrics |= correction.metrics
    if args.get_mismatch_metrics:
        metrics = mismatch_metrics(proximal, behaviour, layout) | metrics  # the plug-in's metrics win
    return Corrected(loss, metrics, mask)


def _custom_tis(
    args: Flags, path: str, loss: Tensor, proximal: Tensor, behaviour: Tensor, mb: MicroBatch
) -> Corrected:
    """Apply a plug-in's weights; its masks remove tokens from every numerator, never from a denominator."""
    with plugin_call("--custom-tis-function-path", path):
        corrected, masks, metrics = load_function(path)(
            args=args,
            pg_loss=loss,
            train_log_probs=split_by_sample(proximal, mb),
            rollout_log_probs=split_by_sample(behaviour, mb),
            loss_masks=split_by_sample(mb.loss_mask, mb),
            total_lengths=list(mb.documents.lengths),
            response_lengths=list(mb.response_lengths),
        )
    masks = list(masks)
    lengths = tuple(len(mask) if mask.ndim == 1 else -1 for mask in masks)
    if corrected.shape != loss.shape or lengths != mb.response_lengths:
        raise ValueError(
            f"--custom-tis-function-path {path} returned a loss of shape {tuple(corrected.shape)} and masks "
            f"of {[tuple(mask.shape) for mask in masks]} for responses of {list(mb.response_lengths)} "
            "tokens: return one loss per token, flat, and one mask per sample with a value per token."
        )
    # The plug-in can remove trained tokens, but cannot add tokens that are not trained.
    mask = torch.where(mb.loss_mask != 0, torch.cat(masks).to(loss) / mb.loss_mask, torch.zeros_like(loss))
    return Corrected(torch.where(mask != 0, corrected, torch.zeros_like(corrected)), dict(metrics), mask)


def _reference_kl(args: Flags, inputs: PolicyInputs, mb: MicroBatch) -> Tensor:
    """KL to the reference per token, unbiased by the token's own ratio whatever ratio the loss uses."""
    ratio = exp_ratio(inputs.log_probs - inputs.old_log_probs) if args.use_unbiased_kl else None
    reference = _trained(mb, "ref_log_probs", inputs.log_probs)
    return compute_approx_kl(inputs.log_probs, reference, args.kl_loss_type, ratio)
