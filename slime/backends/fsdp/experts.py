"""How evenly a mixture of experts is used: counts of chosen experts by layer, gathered while a step trains."""

from typing import Any

import torch
from torch import Tensor, nn


class ExpertLoad:
    """Listens to the routers of a model. A router is a module with `top_k` and `num_experts` that returns chosen indices last."""

    def __init__(self, lm: nn.Module) -> None:
        self._counts: dict[int, Tensor] = {}
        routers = [
            m for m in lm.modules() if hasattr(m, "top_k") and hasattr(m, "num_experts") and hasattr(m, "weight")
        ]
        for index, router in enumerate(routers):
            router.register_forward_hook(lambda module, _, out, index=index: self._record(index, module, out))

    def _record(self, index: int, router: nn.Module, output: Any) -> None:
        if not (router.training and isinstance(output, tuple) and output[-1].dtype == torch.int64):
            return
        chosen = output[-1].detach().flatten()
        counts = torch.zeros(router.num_experts, dtype=torch.float64, device=chosen.device)
        counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float64))
        self._counts[index] = self._counts[index] + counts if index in self._counts else counts

    def take(self) -> Tensor | None:
        """Counts [layers, experts] since the last call; None for a model without experts."""
        if not self._counts:
            return None
        counts = torch.stack([self._counts[index] for index in sorted(self._counts)])
        self._counts = {}
        return counts


def load_metrics(counts: Tensor) -> dict[str, float]:
    """From counts [layers, experts] over all ranks: the busiest expert against the mean, and the share of idle ones."""
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1.0) * counts.shape[1]
    return {
        "moe_load_max_over_mean": share.max(-1).values.mean().item(),
        "moe_load_worst_layer": share.max().item(),
        "moe_idle_experts": (counts == 0).double().mean().item(),
    }
