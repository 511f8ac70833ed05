"""Policy-gradient losses per token: the functions behind the rows of `catalog.policy_losses`.

Convention: `ppo_kl = old_log_prob - log_prob`, so the probability ratio is exp(-ppo_kl), with the exponent
bounded as in `ratios`. Nothing here reduces: masks and denominators belong to `reduce`. All tensors are flat
over the response tokens of a micro-batch, [R].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.ratios import exp_ratio
from slime.algorithms.reduce import segment_mean
from slime.arguments import PluginArgs
from slime.catalog.policy_losses import POLICY_LOSSES
from slime.utils.misc import load_function


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a policy loss: the S samples and R response tokens of a micro-batch."""

    log_probs: Tensor  # [R] of the current policy, with gradient
    old_log_probs: Tensor  # [R] of the policy in the ratio's denominator
    advantages: Tensor  # [R]
    mask: Tensor  # [R] 0/1
    segments: Tensor  # [R] which sample a token belongs to
    num_samples: int


@dataclass(frozen=True)
class PolicyOptions:
    """Constants of the losses; each loss reads its own."""

    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None  # dual clip; None: off
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    dppo_delta: float = 0.15


@dataclass(frozen=True)
class PolicyTerms:
    """Per token: the loss, whether a clip or mask decided about it (0/1), and ppo_kl as the ratio used it."""

    loss: Tensor  # [R]
    clipped: Tensor  # [R]
    ppo_kl: Tensor  # [R]


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss and whether the clip decided (0/1), per token.

    `eps_clip_c` > 1 adds the dual clip: with a negative advantage the loss never exceeds -c x advantage.
    """
    ratio = exp_ratio(-ppo_kl)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(
                f"--eps-clip-c is {eps_clip_c}: the dual clip bounds the ratio from above; use a value > 1."
            )
        loss = torch.where(advantages < 0, torch.minimum(-eps_clip_c * advantages, loss), loss)
    return loss, (clipped > plain).to(ppo_kl.dtype)


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO: REINFORCE weighted by a clipped, detached ratio, so that no token loses its gradient."""
    ratio = exp_ratio(-ppo_kl).detach()
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped * advantages * log_probs, (clipped != ratio).to(log_probs.dtype)


def sequence_kl(ppo_kl: Tensor, mask: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Each token's ppo_kl replaced by its sample's masked mean (the GSPO ratio), in the flat layout."""
    return segment_mean(ppo_kl, mask, segments, num_segments)[segments]


def ppo(x: PolicyInputs, o: PolicyOptions) -> PolicyTerms:
    ppo_kl = x.old_log_probs - x.log_probs
    loss, clipped = compute_policy_loss(ppo_kl, x.advantages, o.eps_clip, o.eps_clip_high, o.eps_clip_c)
    return PolicyTerms(loss, clipped, ppo_kl)


def gspo(x: PolicyInputs, o: PolicyOptions) -> PolicyTerms:
    """The clip on one ratio per sequence: the geometric mean of its token ratios."""
    ppo_kl = sequence_kl(x.old_log_probs - x.log_probs, x.mask, x.segments, x.num_samples)
    loss, clipped = compute_policy_loss(ppo_kl, x.advantages, o.eps_clip, o.eps_clip_high, o.eps_clip_c)
    return PolicyTerms(loss, clipped, ppo_kl)


def cispo(x: PolicyInputs, o: PolicyOptions) -> PolicyTerms:
    ppo_kl = x.old_log_probs - x.log_probs
    loss, clipped = compute_cispo_loss(ppo_kl, x.log_probs, x.advantages, o.eps_clip, o.eps_clip_high)
    return PolicyTerms(loss, clipped, ppo_kl)


def sapo(x: PolicyInputs, o: PolicyOptions) -> PolicyTerms:
    """A soft gate for the clip: sigmoid(tau (ratio - 1)) x 4 / tau, steeper where the advantage is negative.

    Its slope at ratio 1 is 1, and it fades where a hard clip would cut.
    """
    ppo_kl = x.old_log_probs - x.log_probs
    tau = torch.full_like(ppo_kl, o.sapo_tau_neg).masked_fill(x.advantages > 0, o.sapo_tau_pos)
    gate = torch.sigmoid(tau * (exp_ratio(-ppo_kl) - 1)) * 4 / tau
    return PolicyTerms(-gate * x.advantages, torch.zeros_like(ppo_kl), ppo_kl)


def gmpo(x: PolicyInputs, o: PolicyOptions) -> PolicyTerms:
    """Weight by the geometric mean of token ratios, each clipped in the direction of the advantage."""
    log_ratio = x.log_probs - x.old_log_probs
    rising = torch.minimum(log_ratio, torch.full_like(log_ratio, o.eps_clip_high))
    falling = torch.maximum(log_ratio, torch.full_like(log_ratio, -o.eps_clip))
    bounded = torch.where(x.advantages > 0, rising, falling)
    ppo_kl = sequence_kl(-bounded, x.mask, x.segments, x.num_samples)
    return PolicyTerms(-exp_ratio(-ppo_kl) * x.advantages, (bounded != log_ratio).to(log_ratio.dtype), ppo_kl)


def _divergence_mask(x: PolicyInputs, divergence: Tensor, delta: float) -> PolicyTerms:
    """Return 0 for tokens whose probability moved far and would move farther; nothing is clipped."""
    ppo_kl = x.old_log_probs - x.log_probs
    ratio = exp_ratio(-ppo_kl)
    away = ((x.advantages > 0) & (ratio > 1)) | ((x.advantages < 0) & (ratio < 1))
    dropped = away & (divergence > delta)
    loss = torch.where(dropped, torch.zeros_like(ratio), -ratio * x.advantages)
    return PolicyTerms(loss, dropped.to(ratio.dtype), ppo_kl)


def dppo_tv(x: PolicyInputs, o: PolicyOptions) -> PolicyTerms:
    """Mask by total variation between "this token" and "another": |p_old - p_new|."""
    old, new = x.old_log_probs.detach().exp(), x.log_probs.detach().exp()
    return _divergence_mask(x, (old - new).abs(), o.dppo_delta)


def dppo_kl(x: PolicyInputs, o: PolicyOptions) -> PolicyTerms:
    """Mask by KL(old || new) between "this token" and "another"."""
    tiny = torch.finfo(x.old_log_probs.dtype).eps
    old, new = (p.detach().exp().clamp(tiny, 1 - tiny) for p in (x.old_log_probs, x.log_probs))
    kl = old * torch.log(old / new) + (1 - old) * torch.log((1 - old) / (1 - new))
    return _divergence_mask(x, kl, o.dppo_delta)


def compute_policy_terms(name: str, inputs: PolicyInputs, options: PolicyOptions) -> PolicyTerms:
    """Return the loss terms of the policy loss with that catalog name."""
    return load_function(POLICY_LOSSES[name].function)(inputs, options)


def compute_gspo_kl(
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    local_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """Sequence-level ppo_kl of each sample, repeated over its local tokens and concatenated."""
    per_sample = [
        ((old - new) * mask).sum() / mask.sum().clamp(min=1)
        for new, old, mask in zip(full_log_probs, full_old_log_probs, loss_masks, strict=True)
    ]
    return torch.cat([kl.expand_as(local) for kl, local in zip(per_sample, local_log_probs, strict=True)])


def compute_opsm_mask(
    args: PluginArgs,  # plug-ins call it with theirs
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Off-policy sequence mask over the concatenated tokens, and the masked share summed over samples."""
    kept, masked_shares = [], []
    samples = zip(full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True)
    for new, old, advantage, mask in samples:
        total = mask.sum().clamp(min=1)
        drifted = ((old - new) * mask).sum() / total > args.opsm_delta
        masked = ((advantage < 0) & drifted).to(new.dtype)
        kept.append(1.0 - masked)
        masked_shares.append((masked * mask).sum() / total)
    return torch.cat(kept), torch.stack(masked_shares).sum()
