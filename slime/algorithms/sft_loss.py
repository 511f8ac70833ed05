"""Supervised fine-tuning loss: the negative log-prob of each target token."""

from torch import Tensor


def compute_sft_loss(log_probs: Tensor) -> Tensor:
    """Per-token loss; masks and denominators are applied by the reducer."""
    return -log_probs
