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
    dense = hf.first_k_dense_replace
    groups = hf.n_group if hf.n_group and hf.n_group > 1 else None
    return {
        "num_moe_experts": hf.n_routed_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts or None,
        "moe_layer_freq": [int(layer >= dense) for layer in range(hf.num_hidden_layers)],
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": hf.topk_group if groups else None,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }


def _refuse(hf: Any) -> None:
    chosen, groups = hf.num_experts_per_tok, hf.n_group or 1
    if not hf.norm_topk_prob or chosen == 1:
        raise ValueError(
            f"{hf.model_type} with norm_topk_prob={hf.norm_topk_prob} and num_experts_per_tok={chosen}: "
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
        "rotates_neighbours": bool(hf.rope_interleave),
        "rope_type": "rope",
        "rotary_scaling_factor": rope["factor"] if scaled else 1.0,
        "mscale_all_dim": rope["mscale_all_dim"] if scaled else 0.0,
    }
    return dense_settings(hf) | sigmoid_settings(hf) | mla


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
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")  # a DeepSeek-V3 under another name
