"""Selects the modules of each decoder layer: Megatron's own, or our replacements."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime.backends.megatron.modules.gated_delta_net import PackedGatedDeltaNet
from slime.backends.megatron.modules.grouped_experts import GroupedExperts
from slime.backends.megatron.modules.layers import GatedSelfAttention, NormedAdd, PackedCoreAttention, RMSNorm
from slime.backends.megatron.modules.mla import MLANorm, PackedMLA
from slime.backends.megatron.modules.routing import PackedRouter, RoutedLayer
from slime.backends.megatron.modules.sparse_attention import SparseMLA, SparseMLAConfig, check_stage
from slime.backends.megatron.modules.wide_norm import WideNormConfig, wide_norms


def layer_spec(
    config: TransformerConfig,
    *,
    moe: bool,
    attention: type[PackedCoreAttention],
    branch_norms: bool = False,
    delta_net: bool = False,
) -> ModuleSpec:
    """Return a decoder layer of Megatron's own modules, with our norms and the given core attention.

    `delta_net`: it has a gated delta net in place of attention.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer, outer = spec.submodules, spec.submodules.self_attention
    outer.submodules.core_attention = attention
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if config.multi_latent_attention:
        outer.module = SparseMLA if isinstance(config, SparseMLAConfig) else PackedMLA
        outer.submodules.q_layernorm = outer.submodules.kv_layernorm = MLANorm
    elif config.qk_layernorm:
        outer.submodules.q_layernorm = outer.submodules.k_layernorm = RMSNorm
    elif isinstance(config, WideNormConfig):
        outer.submodules.q_layernorm, outer.submodules.k_layernorm = wide_norms(config)
    if config.attention_output_gate:
        outer.module = GatedSelfAttention
    if delta_net:
        layer.self_attention = ModuleSpec(module=PackedGatedDeltaNet)
    if moe:
        spec.module, mixture = RoutedLayer, layer.mlp.submodules
        mixture.router, mixture.experts.module = PackedRouter, GroupedExperts
    if branch_norms:
        sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(module=NormedAdd, params=sizes)
    return spec


def block_spec(
    config: TransformerConfig,
    vp_stage: int | None,
    *,
    attention: type[PackedCoreAttention],
    branch_norms: bool = False,
) -> TransformerBlockSubmodules:
    """Return the spec of the layers that this pipeline stage (and virtual stage) builds."""
    first = get_transformer_layer_offset(config, vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    check_stage(config, first)
    pattern, delta_nets = moe_pattern(config), config.linear_attention_freq or [0] * config.num_layers
    specs = [
        layer_spec(
            config,
            moe=pattern[layer],
            attention=attention,
            branch_norms=branch_norms,
            delta_net=bool(delta_nets[layer]),
        )
        for layer in range(first, first + count)
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def moe_pattern(config: TransformerConfig) -> list[bool]:
    """Return for each decoder layer of the whole model whether it is a mixture of experts."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(entry) for entry in frequency]
