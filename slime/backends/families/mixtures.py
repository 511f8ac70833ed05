"""Families with mixtures of experts: rules for routed and shared experts, and settings of routers."""

from dataclasses import replace
from typing import Any

from slime.backends.families.base import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
    OUTSIDE,
    QK_NORMS,
    Family,
    dense_settings,
    in_layer,
    mtp_rules,
    qkv,
    refuse_biases,
)
from slime.backends.families.dense import QWEN3, qwen3_settings

ROUTED = (
    in_layer("mlp.router.weight", "mlp.gate.weight", "replicated"),
    in_layer(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        "gate_up",
    ),
    in_layer(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.{expert}.down_proj.weight", "row"
    ),
)
SHARED = (
    in_layer(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        "gate_up",
    ),
    in_layer("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight", "row"),
)
# The choice of experts depends on the last bits of this bias: hub checkpoints keep it in fp32.
CORRECTION_BIAS = in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "exact")


def sigmoid_settings(hf: Any) -> dict[str, Any]:
    """Return settings of routers with sigmoid scores, a bias only for the choice, and groups of experts."""
    _refuse(hf)
    groups = hf.n_group if hf.n_group and hf.n_group > 1 else None
    return {
        "num_moe_experts": hf.n_routed_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts or None,
        "moe_layer_freq": _sparse_layers(hf),
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": hf.topk_group if groups else None,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }


def _sparse_layers(hf: Any) -> list[int]:
    """Return 1 for each layer that is a mixture; newer configs list the kinds of all layers."""
    if (kinds := getattr(hf, "mlp_layer_types", None)) is not None:
        return [int(kind == "sparse") for kind in kinds]
    return [int(layer >= hf.first_k_dense_replace) for layer in range(hf.num_hidden_layers)]


def _refuse(hf: Any) -> None:
    chosen, groups = hf.num_experts_per_tok, getattr(hf, "n_group", None) or 1
    normed = getattr(hf, "norm_topk_prob", True)
    if not normed or chosen == 1:
        raise ValueError(
            f"{hf.model_type} with norm_topk_prob={normed} and num_experts_per_tok={chosen}: "
            "megatron-core divides sigmoid scores by their sum exactly where several experts are chosen; "
            "use --train-backend fsdp."
        )
    if groups > 1 and chosen // hf.topk_group != 2:
        raise ValueError(
            f"{hf.model_type} with num_experts_per_tok={chosen} and topk_group={hf.topk_group}: "
            f"megatron-core ranks groups by their best {chosen // hf.topk_group} experts, the model by its "
            "best 2; use --train-backend fsdp."
        )


MLA = (
    in_layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", "column"),
    in_layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", "column"),
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", "replicated"),
    in_layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", "column"),
    in_layer("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "column"),
    in_layer("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", "replicated"),
    in_layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", "column"),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "row"),
)


def qwen3_moe_settings(hf: Any) -> dict[str, Any]:
    # A Qwen3.5 has none of these fields: all its layers are sparse, and it always normalises.
    dense, step = getattr(hf, "mlp_only_layers", ()), getattr(hf, "decoder_sparse_step", 1)
    sparse = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(hf.num_hidden_layers)]
    return qwen3_settings(hf) | {
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": sparse,
        "moe_router_topk": hf.num_experts_per_tok,
        # Softmax over the chosen experts is softmax over all, chosen and normalised.
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
    }


def glm4_moe_settings(hf: Any) -> dict[str, Any]:
    return (
        dense_settings(hf)
        | sigmoid_settings(hf)
        | {"add_qkv_bias": hf.attention_bias, "qk_layernorm": hf.use_qk_norm}
    )


def minimax_settings(hf: Any) -> dict[str, Any]:
    _refuse(hf)
    return dense_settings(hf) | {
        "norms_all_heads": True,
        "num_moe_experts": hf.num_local_experts,
        "moe_ffn_hidden_size": hf.intermediate_size,
        "moe_layer_freq": [1] * hf.num_hidden_layers,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }


def deepseek_settings(hf: Any) -> dict[str, Any]:
    refuse_biases(hf, "attention_bias")
    rope = hf.rope_parameters
    # Longer contexts also scale the attention; Megatron computes the scale from these two.
    scaled = rope["rope_type"] != "default" and rope.get("mscale_all_dim")
    mla = {
        "multi_latent_attention": True,
        "num_query_groups": hf.num_attention_heads,
        "kv_channels": hf.qk_nope_head_dim + hf.qk_rope_head_dim,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "qk_layernorm": True,
        "rotates_neighbours": bool(getattr(hf, "rope_interleave", True)),
        "rope_type": "rope",
        "rotary_scaling_factor": rope["factor"] if scaled else 1.0,
        "mscale_all_dim": rope["mscale_all_dim"] if scaled else 0.0,
    }
    return dense_settings(hf) | sigmoid_settings(hf) | mla


def sparse_attention_settings(hf: Any) -> dict[str, Any]:
    kinds = getattr(hf, "indexer_types", None) or ["full"] * hf.num_hidden_layers
    return deepseek_settings(hf) | {
        "index_topk": hf.index_topk,
        "index_heads": hf.index_n_heads,
        "index_head_dim": hf.index_head_dim,
        # DeepSeek-V3.2 rotates halves in the indexer.
        "index_rotates_neighbours": hf.model_type == "glm_moe_dsa",
        "index_layers": [int(kind == "full") for kind in kinds[: hf.num_hidden_layers]],
    }


# Experts as Mixtral names them: w1 is the gate, w3 the up projection, w2 the down projection.
MIXTRAL_EXPERTS = (
    in_layer("mlp.router.weight", "block_sparse_moe.gate.weight", "replicated"),
    in_layer("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias", "exact"),
    in_layer(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
        "gate_up",
    ),
    in_layer(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        "block_sparse_moe.experts.{expert}.w2.weight",
        "row",
    ),
)
_MTP_PREFIX = "model.layers.{beyond}"
_MTP_RULES = mtp_rules(_MTP_PREFIX, "enorm", "hnorm", "eh_proj", "shared_head.norm", "column")
QWEN3_MOE = Family("qwen3_moe", qwen3_moe_settings, (*QWEN3.rules, *ROUTED))
# GLM-4.5, 4.6 and 4.7: dense layers, then mixtures with shared experts; each head is partly rotated.
GLM4_MOE = Family(
    "glm4_moe",
    glm4_moe_settings,
    (
        *(*OUTSIDE, *NORMS, *ATTENTION, qkv("bias"), *QK_NORMS, *DENSE_MLP),
        *(*ROUTED, *SHARED, CORRECTION_BIAS),
    ),
    mtp_prefix=_MTP_PREFIX,
    mtp_rules=_MTP_RULES,
)
# DeepSeek-V3 and R1, and models of that type such as Moonlight: MLA and shared experts.
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    deepseek_settings,
    (*OUTSIDE, *NORMS, *MLA, *DENSE_MLP, *ROUTED, *SHARED, CORRECTION_BIAS),
    mtp_prefix=_MTP_PREFIX,
    mtp_rules=_MTP_RULES,
)
_INDEXER = (
    *(
        in_layer(f"self_attention.indexer.{name}", f"self_attn.indexer.{name}", "replicated")
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
    ),
    in_layer("self_attention.indexer.weights_proj.weight", "self_attn.indexer.weights_proj.weight", "exact"),
)
# DeepSeek-V3.2: DeepSeek-V3 with an indexer, which selects the keys that a token sees.
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    settings=sparse_attention_settings,
    rules=(*DEEPSEEK_V3.rules, *_INDEXER),
    layer_kinds=("indexed_attention",),
)
GLM_MOE_DSA = replace(DEEPSEEK_V32, model_type="glm_moe_dsa")  # GLM-5 to 5.2: layers can share a selection
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")  # a DeepSeek-V3 under another name
GLM4_MOE_LITE = replace(DEEPSEEK_V3, model_type="glm4_moe_lite")  # GLM-4.7-Flash: the same tensors
# MiniMax-M2: partly rotated heads, one norm over all queries and one over all keys, a mixture in every layer.
MINIMAX_M2 = Family(
    "minimax_m2",
    minimax_settings,
    (
        *(*OUTSIDE, *NORMS, *ATTENTION, *MIXTRAL_EXPERTS),
        in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "column"),
        in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "column"),
    ),
)
