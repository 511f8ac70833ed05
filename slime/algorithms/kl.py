"""Estimators of the KL divergence between two policies from the log-probs of sampled tokens."""

import torch
from torch import Tensor

from slime.algorithms.ratios import bound_log_ratio

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
# low_var_kl keeps one runaway token from dominating a whole step.
LOW_VAR_LIMIT = 10.0


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Per-token estimate of KL(policy || base), at least in fp32.

    With d = log_probs - log_probs_base: k1 is d, k2 is d^2/2, k3 and low_var_kl are exp(-d) - 1 + d with d
    bounded as in `ratios`; low_var_kl is clamped to [-10, 10] at the end. `importance_ratio` (policy over
    behaviour policy) makes the estimate unbiased when the tokens were sampled by an older policy.
    """
    delta = log_probs - log_probs_base
    if delta.dtype in (torch.float16, torch.bfloat16):
        delta = log_probs.float() - log_probs_base.float()
    if kl_loss_type == "k1":
        kl = delta
    elif kl_loss_type == "k2":
        kl = delta.square() / 2
    elif kl_loss_type in ("k3", "low_var_kl"):
        # The whole term is bounded: if only exp were, the linear term would push a runaway token further.
        delta = bound_log_ratio(delta)
        kl = torch.exp(-delta) - 1 + delta
    else:
        raise ValueError(
            f"--kl-loss-type is {kl_loss_type!r}: no such estimator; choose one of {', '.join(KL_TYPES)}."
        )
    if importance_ratio is not None:
        kl = kl * importance_ratio
    if kl_loss_type == "low_var_kl":
        kl = kl.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
    return kl
