"""MLA (multi-head latent attention) for packed streams, with the HF model's rotary angles."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from slime.backends.attention.packed_documents import takes_varlen
from slime.backends.megatron.modules.layers import PackedCoreAttention, RMSNorm, rotate
from slime.backends.megatron.stream import PackedStream

_LATENT_EPS = 1e-6  # hub models use it for the norms of both latents, whatever the config says


@dataclass
class MLAConfig(MLATransformerConfig):
    """MLATransformerConfig with a second kind of rotation, for which Megatron's own has no field."""

    rotates_neighbours: bool = True  # False: halves


class MLANorm(RMSNorm):
    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = _LATENT_EPS, **ignored: Any
    ) -> None:
        super().__init__(config, hidden_size, _LATENT_EPS)


class MLACoreAttention(PackedCoreAttention):
    """Packed attention for MLA: queries and keys arrive rotated, and values are narrower than keys."""

    def rotate(self, x: Tensor, stream: PackedStream) -> Tensor:
        return x

    def attend(self, query: Tensor, key: Tensor, value: Tensor, stream: PackedStream) -> Tensor:
        width = value.shape[-1]
        if takes_varlen(query):
            # The fused kernel needs equal widths.
            value = F.pad(value, (0, query.shape[-1] - width))
        return super().attend(query, key, value, stream)[..., :width]


class PackedMLA(MLASelfAttention):
    """Megatron's MLA with the stream's angles: Megatron supports few kinds of RoPE scaling."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedStream | None = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, ...]:
        """hidden [T, 1, H] -> query and key [T, heads, D], value [T, heads, V], and the latents."""
        config, stream = self.config, packed_seq_params
        assert stream is not None, "this model needs a PackedStream"
        narrow, turned = config.qk_head_dim, config.qk_pos_emb_head_dim
        latent_query = hidden_states
        if config.q_lora_rank is not None:
            down = gather_from_tensor_model_parallel_region(self.linear_q_down_proj(hidden_states)[0])
            latent_query = self.q_layernorm(self._cut_sequence(down))
        up = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = self._by_head(up(latent_query)[0], narrow + turned)
        down = gather_from_tensor_model_parallel_region(self.linear_kv_down_proj(hidden_states)[0])
        latent, shared_key = down.split((config.kv_lora_rank, turned), dim=-1)
        latent = self.kv_layernorm(self._cut_sequence(latent))
        key, value = self._by_head(self.linear_kv_up_proj(latent)[0], narrow + config.v_head_dim).split(
            (narrow, config.v_head_dim), dim=-1
        )
        # Every rank uses it for its own heads, so its gradient is summed over the ranks.
        shared_key = copy_to_tensor_model_parallel_region(shared_key)
        plain, query_part = query.split((narrow, turned), dim=-1)
        angles = {"cos": stream.cos, "sin": stream.sin, "interleaved": config.rotates_neighbours}
        query = torch.cat((plain, rotate(query_part, **angles)), dim=-1)
        shared_key = rotate(shared_key, **angles).expand(-1, key.shape[1], -1)
        return query, torch.cat((key, shared_key), dim=-1), value, latent_query, latent

    def _cut_sequence(self, x: Tensor) -> Tensor:
        """Return this rank's part of the tokens, if the projection gathered all of them."""
        return scatter_to_sequence_parallel_region(x) if self.config.sequence_parallel else x

    def _by_head(self, x: Tensor, width: int) -> Tensor:
        return x.view(x.shape[0], self.num_attention_heads_per_partition, width)
