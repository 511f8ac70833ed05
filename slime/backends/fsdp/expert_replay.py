"""Replays the experts that an engine chose: the routers of transformers take them instead of their top k.

A router's own code computes the weights of the experts, from the scores at the replayed indices, so the
gradient of the router is that of its family.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slime.algorithms.model_parts import decoder_layers, routers
from slime.backends.base import MicroBatch
from slime.backends.fsdp.families import needs_whole_documents
from slime.backends.fsdp.layer_execution import HFModel
from slime.backends.shared.microbatch import check_routed_experts

_FLAG = "--use-rollout-routing-replay"


class ExpertReplay:
    """Holds the choices of the current pass, which layers also need when they are recomputed."""

    def __init__(self, lm: HFModel) -> None:
        self._chosen: Tensor | None = None
        layers = decoder_layers(lm)
        found = [(number, router) for number, layer in enumerate(layers) for router in routers(layer)]
        kind = lm.config.model_type
        if not found:
            raise ValueError(f"{_FLAG}: {kind} has no routers of experts that can be replayed; remove it.")
        if needs_whole_documents(lm):
            raise ValueError(
                f"{_FLAG}: the FSDP trainer replays experts where it packs samples, and it computes each "
                f"sample of {kind} alone; use --train-backend megatron."
            )
        self._expected = (len(layers), found[0][1].top_k, found[0][1].num_experts)
        for number, router in found:
            router.forward = types.MethodType(self._replaying(number, type(router).forward), router)

    def check(self, mb: MicroBatch) -> None:
        check_routed_experts(mb, *self._expected)

    def follow(self, chosen: Tensor | None) -> None:
        """Replay these choices [T, layers, top k] in the next pass; None, or -1: the router chooses."""
        self._chosen = chosen

    def _replaying(self, number: int, plain: Any) -> Any:
        def forward(router: nn.Module, *inputs: Any) -> Any:
            if self._chosen is None:
                return plain(router, *inputs)
            with _GivenExperts(router, self._chosen[:, number].long()) as given:
                output = plain(router, *inputs)
            if not given.used:
                raise ValueError(f"{_FLAG}: {type(router).__name__} does not choose experts by a top k.")
            return output

        return forward


class _GivenExperts(TorchFunctionMode):
    """Answers a router's top k over all its experts with given indices and the scores there."""

    def __init__(self, router: Any, chosen: Tensor) -> None:
        super().__init__()
        self._router, self._chosen, self.used = router, chosen, False

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        if result.indices.shape[-1] != self._router.top_k or args[0].shape[-1] != self._router.num_experts:
            return result  # it chooses groups of experts
        self.used = True
        indices = torch.where(self._chosen < 0, result.indices, self._chosen)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))
