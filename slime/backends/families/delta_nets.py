"""Families that alternate gated delta nets with gated attention: Qwen3-Next."""

from typing import Any

from slime.backends.families.base import (
    DENSE_MLP,
    NORMS,
    OUTSIDE,
    QK_NORMS,
    Family,
    Rule,
    in_layer,
    mtp_rules,
)
from slime.backends.families.mixtures import ROUTED, qwen3_moe_settings

LINEAR = "linear_attention"


def delta_settings(hf: Any) -> dict[str, Any]:
    """Return what these layers have beside those of a Qwen3: a gate, norms around zero, delta nets."""
    return {
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "linear_attention_freq": [int(kind == LINEAR) for kind in hf.layer_types],
        "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
        "linear_key_head_dim": hf.linear_key_head_dim,
        "linear_value_head_dim": hf.linear_value_head_dim,
        "linear_num_key_heads": hf.linear_num_key_heads,
        "linear_num_value_heads": hf.linear_num_value_heads,
    }


def shared_expert_settings(hf: Any) -> dict[str, Any]:
    return {
        "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def qwen3_next_settings(hf: Any) -> dict[str, Any]:
    return qwen3_moe_settings(hf) | shared_expert_settings(hf) | delta_settings(hf)


def _delta_net(projections: tuple[str, ...], kind: str) -> tuple[Rule, ...]:
    """Make the rules of a gated delta net whose input projections have these names in the hub."""
    inputs = tuple(f"linear_attn.in_proj_{name}.weight" for name in projections)
    return (
        in_layer("self_attention.in_proj.weight", inputs, kind),
        in_layer("self_attention.conv_weight", "linear_attn.conv1d.weight", "delta_conv"),
        in_layer("self_attention.dt_bias", "linear_attn.dt_bias", "column"),
        in_layer("self_attention.A_log", "linear_attn.A_log", "column"),
        in_layer("self_attention.norm_weight", "linear_attn.norm.weight", "replicated"),
        in_layer("self_attention.out_proj.weight", "linear_attn.out_proj.weight", "row"),
    )


_QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
GATED_ATTENTION = (
    in_layer("self_attention.linear_qkv.weight", _QKV, "gated_qkv"),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "row"),
    *QK_NORMS,
)
GATED_SHARED = (
    in_layer(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        "gate_up",
    ),
    in_layer("mlp.shared_experts.linear_fc2.weight", "mlp.shared_expert.down_proj.weight", "row"),
    in_layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "replicated"),
)
_COMMON = (*OUTSIDE, *NORMS, *GATED_ATTENTION, *DENSE_MLP)
_MTP_RULES = mtp_rules("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "column")
QWEN3_NEXT = Family(
    "qwen3_next",
    qwen3_next_settings,
    (*_COMMON, *_delta_net(("qkvz", "ba"), "delta_fused"), *ROUTED, *GATED_SHARED),
    mtp_prefix="mtp",
    mtp_rules=_MTP_RULES,
    mtp_layer="mtp.layers.{head}",
    mtp_heads=1,
    layer_kinds=("full_attention", LINEAR),
)
