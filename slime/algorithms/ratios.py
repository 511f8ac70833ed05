"""Probability ratios from differences of log-probs, bounded so that no exponential overflows.

A log-ratio counts as at most 20 in size: e^20 is beyond any bound in use, and e^89 is infinite in fp32, which
would end a run at one runaway token. Outside the bound a token gives no gradient. NaN stays NaN.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def bound_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp of the bounded log-ratio."""
    return torch.exp(bound_log_ratio(log_ratio))


def beyond_bound(log_ratio: Tensor) -> Tensor:
    """Return 1 where the bound took effect, else 0."""
    return (log_ratio.abs() > LOG_RATIO_LIMIT).to(log_ratio.dtype)
