"""Policy-gradient losses per token, from the log-ratio of the current to the old policy.

Convention: `ppo_kl = old_log_prob - log_prob`, so the probability ratio is exp(-ppo_kl). Nothing here reduces: masks
and denominators belong to `reduce`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.reduce import segment_mean


def compute_policy_loss(
    ppo_kl: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss and whether the clip decided (0/1), per token.

    `eps_clip_c` > 1 adds the dual clip: with a negative advantage the loss never exceeds -c x advantage.
    """
    ratio = torch.exp(-ppo_kl)
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
    ppo_kl: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """CISPO: REINFORCE weighted by a clipped, detached ratio, so that no token loses its gradient."""
    ratio = torch.exp(-ppo_kl).detach()
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped * advantages * log_probs, (clipped != ratio).to(log_probs.dtype)


def sequence_kl(ppo_kl: Tensor, mask: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Each token's ppo_kl replaced by its sample's masked mean (the GSPO ratio), in the flat layout."""
    return segment_mean(ppo_kl, mask, segments, num_segments)[segments]


def opsm_keep(
    ppo_kl: Tensor, advantages: Tensor, mask: Tensor, segments: Tensor, num_segments: int, *, delta: float
) -> Tensor:
    """Off-policy sequence mask per token: 0 where the advantage is negative and the sample drifted beyond `delta`."""
    drifted = sequence_kl(ppo_kl.detach(), mask, segments, num_segments) > delta
    return 1.0 - ((advantages < 0) & drifted).to(ppo_kl.dtype)


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
    args,
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Off-policy sequence mask over the concatenated tokens, and the share of masked tokens summed over samples.

    Reads `args.opsm_delta`.
    """
    kept, masked_shares = [], []
    for new, old, advantage, mask in zip(full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True):
        total = mask.sum().clamp(min=1)
        drifted = ((old - new) * mask).sum() / total > args.opsm_delta
        masked = ((advantage < 0) & drifted).to(new.dtype)
        kept.append(1.0 - masked)
        masked_shares.append((masked * mask).sum() / total)
    return torch.cat(kept), torch.stack(masked_shares).sum()
