"""Compiles layers that are not split over ranks into one function over Megatron's own parameters.

Megatron launches norms, rotary angles and the gated activation as kernels of their own, and keeps what lies
between them for the backward pass. Compiled as a whole, as in the FSDP trainer, a layer takes less time and
memory. Parameters, gradient buffers, optimizer and schedules stay Megatron's.

In a mixture of experts, the attention is compiled; router and experts run eagerly. Not compiled are layers
that are split over tensor- or context-parallel ranks, families with additional modules in a layer, and runs
that hook into modules (--overlap-param-gather, selective recomputation).
"""

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from slime.arguments import Args
from slime.backends.attention import packed_documents
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.packed_documents import packed_attention
from slime.backends.megatron.modules.grouped_experts import is_plain_mlp
from slime.backends.megatron.modules.layers import PackedCoreAttention, RMSNorm, rotate
from slime.backends.megatron.modules.lora import ADAPTED
from slime.backends.megatron.modules.routing import RoutedLayer
from slime.backends.megatron.stream import PackedStream

# As for FSDP: a minute of compiling is worth it only if layers keep the GPU busy.
_FROM_WIDTH = 1024
_RECOMPILE_LIMIT = 64


def should_compile(args: Args, config: TransformerConfig, device: torch.device) -> bool:
    """Return whether layers are compiled: by default wide ones on GPUs, never tensor-parallel ones."""
    alone = config.tensor_model_parallel_size == config.context_parallel_size == 1
    hooked = args.overlap_param_gather or config.recompute_granularity == "selective"
    if not alone or hooked or args.compile is False:
        return False
    return bool(args.compile) or (device.type == "cuda" and config.hidden_size >= _FROM_WIDTH)


def compile_layers(chunks: Sequence[nn.Module], config: TransformerConfig, device: torch.device) -> None:
    """Replace the forward of every plain layer by compiled functions."""
    if device.type == "cuda":
        packed_documents.prepare(config.num_attention_heads // config.num_query_groups, config.kv_channels)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    dense = torch.compile(dense_layer, dynamic=True)
    attention = torch.compile(_attend, dynamic=True)

    def run_dense(
        layer: TransformerLayer, hidden_states: Tensor, *, packed_seq_params: PackedStream, **unused: Any
    ) -> tuple[Tensor, None]:
        stream = packed_seq_params
        return dense(layer, hidden_states, stream.cos, stream.sin, stream.documents), None

    def run_routed(
        layer: RoutedLayer, hidden_states: Tensor, *, packed_seq_params: PackedStream, **unused: Any
    ) -> tuple[Tensor, None]:
        stream = packed_seq_params
        layer.mlp.router.routes = stream.routes
        hidden, normed = attention(layer, hidden_states[:, 0], stream.cos, stream.sin, stream.documents)
        return (hidden[:, None] + layer.mlp(normed[:, None])[0]), None

    for module in (module for chunk in chunks for module in chunk.modules()):
        if is_plain(module):
            routed = isinstance(module, RoutedLayer)
            module.forward = types.MethodType(run_routed if routed else run_dense, module)


def is_plain(module: nn.Module) -> bool:
    """Return whether a module is a layer of exactly the parts that `dense_layer` or `_attend` computes."""
    return type(module) in (TransformerLayer, RoutedLayer) and _has_plain_parts(module)


def _has_plain_parts(layer: TransformerLayer) -> bool:
    inner, mlp, config = layer.self_attention, layer.mlp, layer.config
    routed = type(layer) is RoutedLayer
    if type(mlp) is not (MoELayer if routed else MLP):
        return False
    if type(inner) is not SelfAttention or type(inner.core_attention) is not PackedCoreAttention:
        return False
    kinds = {
        inner.linear_qkv: ColumnParallelLinear,
        inner.linear_proj: RowParallelLinear,
        layer.input_layernorm: RMSNorm,
        layer.pre_mlp_layernorm: RMSNorm,
        layer.cross_attention: IdentityOp,
    }
    if not routed:
        kinds |= {mlp.linear_fc1: ColumnParallelLinear, mlp.linear_fc2: RowParallelLinear}
    # A branch with its own norm is added by a module, Megatron's branches by a plain function.
    joins = (layer.self_attn_bda, layer.mlp_bda)
    return bool(
        not any(isinstance(join, nn.Module) for join in joins)
        and all(type(part) in (kind, ADAPTED.get(kind)) for part, kind in kinds.items())
        and is_plain_mlp(config)
        and not config.attention_output_gate
        and config.hidden_dropout == 0.0
        and not config.fp32_residual_connection
    )


def dense_layer(
    layer: TransformerLayer, hidden: Tensor, cos: Tensor, sin: Tensor, documents: PackedDocuments
) -> Tensor:
    """Map hidden [T, 1, H] -> [T, 1, H]: attention and gated MLP, normed and added to their inputs."""
    hidden, normed = _attend(layer, hidden[:, 0], cos, sin, documents)
    gate, up = _linear(layer.mlp.linear_fc1, normed).chunk(2, dim=-1)
    return (hidden + _linear(layer.mlp.linear_fc2, F.silu(gate) * up))[:, None]


def _attend(
    layer: TransformerLayer, hidden: Tensor, cos: Tensor, sin: Tensor, documents: PackedDocuments
) -> tuple[Tensor, Tensor]:
    """Map hidden [T, H] -> (hidden with attention added, the input of the MLP after its norm)."""
    inner = layer.self_attention
    mixed = _linear(inner.linear_qkv, layer.input_layernorm(hidden))
    # For each key-value group its queries, its key and its value.
    mixed = mixed.view(
        hidden.shape[0], inner.num_query_groups_per_partition, -1, inner.hidden_size_per_attention_head
    )
    query, key, value = mixed[:, :, :-2].flatten(1, 2), mixed[:, :, -2], mixed[:, :, -1]
    if inner.q_layernorm is not None:
        query = inner.q_layernorm(query)
    if inner.k_layernorm is not None:
        key = inner.k_layernorm(key)
    query, key = (rotate(x, cos, sin, interleaved=layer.config.rotary_interleaved) for x in (query, key))
    out = packed_attention(query, key, value, documents, scale=inner.core_attention.scale)
    hidden = hidden + _linear(inner.linear_proj, out.flatten(1))
    return hidden, layer.pre_mlp_layernorm(hidden)


def _linear(module: ColumnParallelLinear | RowParallelLinear, x: Tensor) -> Tensor:
    out = F.linear(x, module.weight, module.bias)
    return out + module.adapter(x) if type(module) in ADAPTED.values() else out
