"""Correction for tokens that another policy sampled: importance weights, rejection, masks, metrics.

Three policies may differ: behaviour (the engine that sampled), proximal (the trainer's before this rollout's
updates) and current. The policy loss handles current / proximal; this module handles proximal / behaviour,
from `log_ratio = proximal - behaviour` per token. Flat layout [R] as in `reduce`; nothing has a gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.policy_loss import sequence_kl
from slime.algorithms.ratios import bound_log_ratio, exp_ratio
from slime.algorithms.reduce import segment_mean, segment_sum
from slime.arguments import PluginArgs


@dataclass(frozen=True)
class TokenLayout:
    """Maps the tokens of a micro-batch to samples: mask [R], segments [R] and the number of samples."""

    mask: Tensor
    segments: Tensor
    num_samples: int


@dataclass(frozen=True)
class Correction:
    """Per token: the weight of its policy loss, whether it stays in the loss (0/1), and metrics."""

    weights: Tensor  # [R]
    keep: Tensor  # [R]
    metrics: dict[str, Tensor]  # each [R]


def importance_ratios(log_ratio: Tensor, layout: TokenLayout, level: str) -> Tensor:
    """Return [R]: proximal / behaviour policy, of a token or its sample (product, geometric mean)."""
    log_ratio = log_ratio.detach()
    if level == "sequence":
        masked = torch.where(layout.mask != 0, log_ratio, torch.zeros_like(log_ratio))
        log_ratio = segment_sum(masked, layout.segments, layout.num_samples)[layout.segments]
    elif level == "geometric":
        log_ratio = segment_mean(log_ratio, layout.mask, layout.segments, layout.num_samples)[layout.segments]
    elif level != "token":
        raise ValueError(f"level {level!r}: choose token, sequence or geometric.")
    return exp_ratio(log_ratio)


def mask_outside(ratio: Tensor, low: float, high: float) -> Tensor:
    """Return the ratio inside [low, high] and 0 outside (IcePop at token level)."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


WEIGHT_MODES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "clip": torch.clamp,
    "truncate": lambda ratio, low, high: ratio.clamp(max=high),  # there is no lower bound
    "mask": mask_outside,
}


def importance_weights(
    log_ratio: Tensor, layout: TokenLayout, *, level: str, mode: str, low: float, high: float
) -> Correction:
    """Truncated importance sampling (TIS) and its variants, for one level and one mode of WEIGHT_MODES."""
    ratio = importance_ratios(log_ratio, layout, level)
    weights = WEIGHT_MODES[mode](ratio, low, high)
    return Correction(weights, torch.ones_like(weights), _weight_metrics(weights, ratio))


def _weight_metrics(weights: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    return {"tis": ratio, "tis_clipfrac": (weights != ratio).to(ratio.dtype), "tis_abs": (ratio - 1).abs()}


def rejection(
    log_ratio: Tensor, layout: TokenLayout, *, level: str, low: float, high: float, veto: float | None = None
) -> Correction:
    """Leave out tokens or whole samples whose ratio lies outside [low, high].

    `veto` leaves out every sample with a trained token whose own ratio is below it. Weights stay 1.
    """
    ratio = importance_ratios(log_ratio, layout, level)
    keep = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    metrics = {"rs_rejected": 1.0 - keep}
    if veto is not None:
        token_ratio = importance_ratios(log_ratio, layout, "token")
        fatal = ((token_ratio < veto) & (layout.mask != 0)).to(ratio.dtype)
        vetoed_samples = segment_sum(fatal, layout.segments, layout.num_samples) > 0
        metrics["rs_vetoed"] = vetoed = vetoed_samples[layout.segments].to(ratio.dtype)
        keep = keep * (1.0 - vetoed)
    return Correction(torch.ones_like(ratio), keep, metrics)


def opsm_keep(
    ppo_kl: Tensor, advantages: Tensor, mask: Tensor, segments: Tensor, num_segments: int, *, delta: float
) -> Tensor:
    """Off-policy sequence mask per token: 0 where the advantage is negative and the sample drifted far."""
    drifted = sequence_kl(ppo_kl.detach(), mask, segments, num_segments) > delta
    return 1.0 - ((advantages < 0) & drifted).to(ppo_kl.dtype)


def mismatch_metrics(
    train_log_probs: Tensor, rollout_log_probs: Tensor, layout: TokenLayout
) -> dict[str, Tensor]:
    """[R] each: how far the trainer's policy is from the engine's.

    `mis_kl` and `mis_k3_kl` estimate KL(behaviour || proximal); `mis_chi2_*` are ratio^2 - 1 of token and
    sequence, whose mean is the chi-square divergence; `mis_*_ppl` are perplexities of each sample.
    """
    train, rollout = train_log_probs.detach(), rollout_log_probs.detach()
    log_ratio = bound_log_ratio(train - rollout)
    token, sequence = (importance_ratios(log_ratio, layout, level) for level in ("token", "sequence"))

    def perplexity(log_probs: Tensor) -> Tensor:
        return importance_ratios(-log_probs, layout, "geometric")

    return {
        "mis_kl": -log_ratio,
        "mis_k3_kl": token - 1 - log_ratio,
        "mis_chi2_token": token.square() - 1,
        "mis_chi2_seq": sequence.square() - 1,
        "mis_training_ppl": perplexity(train),
        "mis_rollout_ppl": perplexity(rollout),
    }


def icepop_function(
    args: PluginArgs,  # the arguments as a plug-in gets them
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **_: object,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """IcePop as a `--custom-tis-function-path`: weights inside [--tis-clip-low, --tis-clip], 0 outside."""
    ratio = exp_ratio(torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs))).detach()
    weights = mask_outside(ratio, args.tis_clip_low, args.tis_clip)
    return pg_loss * weights, list(loss_masks), _weight_metrics(weights, ratio)
