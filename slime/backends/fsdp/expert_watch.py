"""Measures during a step how evenly a mixture of experts uses its experts."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.model_parts import routers
from slime.backends.base import MicroBatch
from slime.backends.fsdp.layer_execution import HFModel


class ExpertWatch:
    """Listens to routers: modules with `top_k` and `num_experts` that return chosen indices last."""

    def __init__(self, lm: HFModel) -> None:
        self._listens = False
        self._copies: Tensor | None = None
        self._counts: dict[int, Tensor] = {}
        for index, router in enumerate(routers(lm)):
            router.register_forward_hook(functools.partial(self._record, index))

    @contextmanager
    def listening(self, mb: MicroBatch, copies: Tensor | None = None) -> Iterator[None]:
        """Record routing during a training forward pass; recomputation and padding are not counted.

        `copies` [T]: number of samples that share each token of the stream; None: one.
        """
        self._listens, self._copies = bool(mb.positions), copies
        try:
            yield
        finally:
            self._listens = False

    def _record(self, index: int, router: Any, _inputs: Any, output: Any) -> None:
        if not (self._listens and isinstance(output, tuple) and output[-1].dtype == torch.int64):
            return
        picked = output[-1].detach()
        chosen = picked.flatten()
        counts = torch.zeros(router.num_experts, dtype=torch.float64, device=chosen.device)
        once = torch.ones_like(chosen, dtype=torch.float64)
        weights = once if self._copies is None else self._copies.repeat_interleave(picked.shape[-1]).double()
        counts.index_add_(0, chosen, weights)
        self._counts[index] = self._counts[index] + counts if index in self._counts else counts

    def take(self) -> Tensor | None:
        """Counts [layers, experts] since the last call; None for a model without experts."""
        if not self._counts:
            return None
        counts = torch.stack([self._counts[index] for index in sorted(self._counts)])
        self._counts = {}
        return counts
