"""How unevenly the tokens of a sample use the experts of a layer, as a loss that moves the router."""

import torch
from torch import Tensor


def balance_losses(logits: Tensor, chosen: Tensor, documents: Tensor, num_documents: int) -> Tensor:
    """One value [D] per document from router logits [T, E] and chosen experts [T, k] of one layer.

    E times the sum over experts of (choices per token that went to it) times (mean probability of it): k
    where all are used alike, up to E where few are. Choices have no gradient, probabilities do. By document
    rather than by batch, so that packing, micro-batches and ranks change nothing.
    """
    num_experts = logits.shape[1]
    dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
    probabilities = logits.to(dtype).softmax(-1)
    choices = torch.zeros_like(probabilities).scatter_add_(1, chosen, torch.ones_like(chosen, dtype=dtype))
    lengths = torch.bincount(documents, minlength=num_documents).clamp(min=1).to(dtype)[:, None]
    zeros = torch.zeros(num_documents, num_experts, dtype=dtype, device=logits.device)
    share = zeros.index_add(0, documents, choices.detach()) / lengths
    mean = zeros.index_add(0, documents, probabilities) / lengths
    return num_experts * (share * mean).sum(-1)


def load_metrics(counts: Tensor) -> dict[str, float]:
    """The busiest expert over the mean, and the idle share, from counts [layers, experts] over all ranks."""
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1.0) * counts.shape[1]
    return {
        "moe_load_max_over_mean": share.max(-1).values.mean().item(),
        "moe_load_worst_layer": share.max().item(),
        "moe_idle_experts": (counts == 0).double().mean().item(),
    }
