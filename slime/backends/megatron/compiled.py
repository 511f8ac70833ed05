"""Dense layers that no other rank shares run as one compiled function over Megatron's own parameters.

Layer by layer Megatron launches norms, rotary angles and the gated activation as kernels of their own, and
keeps what lies between them for the backward pass. Compiled as a whole, as the FSDP trainer does it, a layer
takes less time and memory. Parameters, gradient buffers, optimizer and schedules stay Megatron's.

Not covered, and left as Megatron runs them: layers cut over tensor- or context-parallel ranks, mixtures of
experts, families with further modules in a layer, and what hooks into modules (--overlap-param-gather,
selective recomputation).
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
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from slime.arguments import Args
from slime.backends.attention import packed
from slime.backends.attention.packed import PackedDocuments, packed_attention
from slime.backends.megatron.layers import PackedCoreAttention, RMSNorm, rotate
from slime.backends.megatron.stream import PackedStream

# As for FSDP: a minute of compiling pays only where a layer keeps the GPU busy.
_FROM_WIDTH = 1024
_RECOMPILE_LIMIT = 64


def should_compile(args: Args, config: TransformerConfig, device: torch.device) -> bool:
    """By default on GPUs for layers of some width; never where a layer is not computed by one rank alone."""
    alone = config.tensor_model_parallel_size == config.context_parallel_size == 1
    hooked = args.overlap_param_gather or config.recompute_granularity == "selective"
    if not alone or hooked or args.compile is False:
        return False
    return bool(args.compile) or (device.type == "cuda" and config.hidden_size >= _FROM_WIDTH)


def compile_layers(chunks: Sequence[nn.Module], config: TransformerConfig, device: torch.device) -> int:
    """Replace the forward of every plain dense layer; all share one
    compiled function. Returns how many there are.
    """
    if device.type == "cuda":
        packed.prepare(config.num_attention_heads // config.num_query_groups, config.kv_channels)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    compiled = torch.compile(dense_layer, dynamic=True)

    def forward(
        layer: nn.Module, hidden_states: Tensor, *, packed_seq_params: PackedStream, **unused: Any
    ) -> tuple:
        stream = packed_seq_params
        return compiled(layer, hidden_states, stream.cos, stream.sin, stream.documents), None

    plain = [module for chunk in chunks for module in chunk.modules() if is_plain(module)]
    for layer in plain:
        layer.forward = types.MethodType(forward, layer)
    return len(plain)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a layer of exactly the parts that `dense_layer` computes."""
    if type(module) is not TransformerLayer or type(module.mlp) is not MLP:
        return False
    inner, config = module.self_attention, module.config
    if type(inner) is not SelfAttention or type(inner.core_attention) is not PackedCoreAttention:
        return False
    kinds = {
        inner.linear_qkv: ColumnParallelLinear,
        inner.linear_proj: RowParallelLinear,
        module.mlp.linear_fc1: ColumnParallelLinear,
        module.mlp.linear_fc2: RowParallelLinear,
        module.input_layernorm: RMSNorm,
        module.pre_mlp_layernorm: RMSNorm,
        module.cross_attention: IdentityOp,
    }
    # A branch may be normalised where it joins the residual stream;
    # Megatron's own addition is a plain function.
    joins = (module.self_attn_bda, module.mlp_bda)
    return (
        not any(isinstance(join, nn.Module) for join in joins)
        and all(type(part) is kind for part, kind in kinds.items())
        and not config.add_bias_linear
        and not config.attention_output_gate
        and config.gated_linear_unit
        and config.activation_func is F.silu
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0.0
        and config.hidden_dropout == 0.0
        and not config.fp32_residual_connection
    )


def dense_layer(
    layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor, documents: PackedDocuments
) -> Tensor:
    """hidden [T, 1, H] -> [T, 1, H]: attention and gated MLP, each behind a norm and added to its input."""
    inner, mlp, hidden = layer.self_attention, layer.mlp, hidden[:, 0]
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
    gate, up = _linear(mlp.linear_fc1, layer.pre_mlp_layernorm(hidden)).chunk(2, dim=-1)
    return (hidden + _linear(mlp.linear_fc2, F.silu(gate) * up))[:, None]


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)
