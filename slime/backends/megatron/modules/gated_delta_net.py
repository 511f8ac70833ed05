"""A gated delta net for packed streams, in place of Megatron's, which needs CUDA and one sample at a time.

Documents are the rows of a batch, so no state passes from one to the next. The delta rule is that of
transformers, which uses the kernels of flash-linear-attention where they are installed. Heads are split over
tensor-parallel ranks. Context-parallel ranks exchange tokens for heads, so that each has whole documents.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn

from slime.backends.attention.context_parallel import zigzag_positions
from slime.backends.attention.packed_documents import by_document
from slime.backends.megatron.stream import PackedStream

# Parameters that are split by heads over the tensor-parallel ranks.
_BY_HEADS = ("conv_weight", "dt_bias", "A_log")


class PackedGatedDeltaNet(MegatronModule):
    """Maps hidden states [T, 1, H] to [T, 1, H] like Megatron's attention.

    Rows of `in_proj` are ordered by key head: its query, key, values, gates, and a beta and an alpha for each
    of its value heads. Example: 2 value heads per key head of widths 8 and 4 make 4 + 4 + 16 + 16 + 2 + 2.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **ignored: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.heads = config.linear_num_key_heads // self.tp_group.size()
        self.values = config.linear_num_value_heads // config.linear_num_key_heads
        self.key, self.value = config.linear_key_head_dim, config.linear_value_head_dim
        mixed = 2 * self.key + self.values * self.value
        width = mixed + self.values * self.value + 2 * self.values
        linear = {"config": config, "bias": False, "skip_bias_add": False, "tp_group": self.tp_group}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            config.linear_num_key_heads * width,
            init_method=config.init_method,
            gather_output=False,
            **linear,
        )
        self.out_proj = RowParallelLinear(
            config.linear_num_value_heads * self.value,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **linear,
        )
        shapes = {
            "conv_weight": (self.heads * mixed, 1, config.linear_conv_kernel_dim),
            "dt_bias": (self.heads * self.values,),
            "A_log": (self.heads * self.values,),
            "norm_weight": (self.value,),
        }
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(parameter, name in _BY_HEADS, 0, 1)
            self.register_parameter(name, parameter)

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedStream, **ignored: Any
    ) -> tuple[Tensor, Tensor | None]:
        stream, values = packed_seq_params, self.values * self.value
        projected = self.in_proj(hidden_states)[0][:, 0].unflatten(-1, (self.heads, -1))
        mixed, gate, rates = projected.split((2 * self.key + values, values, 2 * self.values), dim=-1)
        out = self._scan(torch.cat((mixed, rates), dim=-1), stream)
        # Each rank computes the gradient of its heads and tokens; it is summed over the ranks.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        normed = F.rms_norm(out.float(), (self.value,), eps=self.config.layernorm_epsilon)
        normed = weight * normed.to(out.dtype) * F.silu(gate.reshape(out.shape).float())
        result: tuple[Tensor, Tensor | None] = self.out_proj(normed.to(out.dtype).flatten(1)[:, None])
        return result

    def _scan(self, mixed: Tensor, stream: PackedStream) -> Tensor:
        """Map [T, key heads, ...] to [T, value heads, width] of this rank's tokens."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        per_head = [
            parameter.view(self.heads, -1, *parameter.shape[1:]).chunk(size)[rank].flatten(0, 1)
            for parameter in (getattr(self, name) for name in _BY_HEADS)
        ]

        def run(batch: Tensor) -> Tensor:
            return self._rows(batch, *per_head)

        if size == 1:
            return by_document(stream.documents, run, mixed)
        lengths = stream.documents.lengths
        order = torch.cat([zigzag_positions(lengths, size, r) for r in range(size)]).to(mixed.device)
        whole = all_to_all(self.cp_group, torch.cat(mixed.chunk(size, dim=1)))
        out = by_document(stream.documents, run, whole.index_select(0, order.argsort()))
        mine = all_to_all(self.cp_group, out.index_select(0, order))
        return torch.cat(mine.chunk(size), dim=1)

    def _rows(self, mixed: Tensor, conv_weight: Tensor, dt_bias: Tensor, a_log: Tensor) -> Tensor:
        """Map documents [B, L, key heads, ...] to [B, L, value heads, width]."""
        # Heavy import, only needed where a model runs.
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        heads = mixed.shape[2]
        qkv, beta, alpha = mixed.split((mixed.shape[-1] - 2 * self.values, self.values, self.values), dim=-1)
        channels, reach = qkv.flatten(2).transpose(1, 2), conv_weight.shape[-1] - 1
        convolved = F.conv1d(F.pad(channels, (reach, 0)), conv_weight, groups=channels.shape[1])
        qkv = F.silu(convolved).transpose(1, 2).unflatten(-1, (heads, -1))
        query, key, value = qkv.split((self.key, self.key, self.values * self.value), dim=-1)
        query, key = (x.repeat_interleave(self.values, dim=2) for x in (query, key))
        decay = -a_log.float().exp() * F.softplus(alpha.flatten(2).float() + dt_bias)
        out: Tensor = torch_chunk_gated_delta_rule(
            query,
            key,
            value.unflatten(-1, (self.values, self.value)).flatten(2, 3),
            g=decay,
            beta=beta.flatten(2).sigmoid(),
            use_qk_l2norm_in_kernel=True,
        )[0]
        return out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(_BY_HEADS, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            place = f"{prefix}{name}."
            found |= sharded_state_dict_default(
                module, place, sharded_offsets, metadata, tp_group=self.tp_group
            )
        return found
