"""A norm over the queries (or keys) of all heads together, which tensor-parallel ranks share."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


@dataclass
class WideNormConfig(TransformerConfig):
    """TransformerConfig of a model whose attention has such norms; Megatron's `qk_layernorm` is off."""

    norms_all_heads: bool = True


class WideNorm(nn.Module):
    """Scales [..., heads, D] by the mean square over the heads of all ranks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-6, **ignored: Any
    ) -> None:
        super().__init__()
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.width, self.eps = heads * hidden_size, eps
        local = torch.ones(self.width // self.group.size(), dtype=config.params_dtype)
        self.weight = nn.Parameter(local)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2).float()
        squares = reduce_from_tensor_model_parallel_region(flat.square().sum(-1, keepdim=True), self.group)
        # Every rank scales its own heads by the sum, so the gradient of the sum is summed as well.
        squares = copy_to_tensor_model_parallel_region(squares, self.group)
        flat = flat * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * flat.to(x.dtype)).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        groups = {"tp_group": self.group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


def wide_norms(config: TransformerConfig) -> tuple[ModuleSpec, ModuleSpec]:
    """Return the specs of the norms of all queries, and of all keys."""
    counts = config.num_attention_heads, config.num_query_groups
    query, key = (ModuleSpec(module=WideNorm, params={"heads": count}) for count in counts)
    return query, key
