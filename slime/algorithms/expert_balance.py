"""Measures how unevenly tokens use the experts of a layer."""

from torch import Tensor


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Return busiest expert / mean, and the idle share, from counts [layers, experts] of all ranks."""
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1.0) * counts.shape[1]
    return {
        "moe_load_max_over_mean": share.max(-1).values.mean().item(),
        "moe_load_worst_layer": share.max().item(),
        "moe_idle_experts": (counts == 0).double().mean().item(),
    }
