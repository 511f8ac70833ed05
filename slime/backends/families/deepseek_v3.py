"""DeepSeek-V3 and R1, and models of that type such as Moonlight: MLA and shared experts."""

from typing import Any

from slime.backends.families.base import (
    DENSE_MLP,
    NORMS,
    OUTSIDE,
    Family,
    dense_settings,
    in_layer,
    mtp_rules,
)
from slime.backends.families.expert_rules import CORRECTION_BIAS, ROUTED, SHARED, sigmoid_settings

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

MTP_PREFIX = "model.layers.{beyond}"


def settings(hf: Any) -> dict[str, Any]:
    if hf.attention_bias:
        raise ValueError("deepseek_v3 with attention_bias is not supported by the Megatron backend.")
    rope = hf.rope_parameters
    # Longer contexts also sharpen the attention; Megatron computes how much from these two.
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


FAMILY = Family(
    "deepseek_v3",
    settings,
    (*OUTSIDE, *NORMS, *MLA, *DENSE_MLP, *ROUTED, *SHARED, CORRECTION_BIAS),
    mtp_prefix=MTP_PREFIX,
    mtp_rules=mtp_rules(MTP_PREFIX, "enorm", "hnorm", "eh_proj", "shared_head.norm", "column"),
)
