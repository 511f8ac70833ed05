"""Families that alternate gated delta nets with gated attention: Qwen3-Next, Qwen3.5, Qwen3.6."""

from dataclasses import replace
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
from slime.backends.families.dense import qwen3_settings
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


def sparse_settings(hf: Any) -> dict[str, Any]:
    shared = {
        "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }
    return qwen3_moe_settings(hf) | shared | delta_settings(hf)


def dense_delta_settings(hf: Any) -> dict[str, Any]:
    return qwen3_settings(hf) | delta_settings(hf)


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
_MTP: dict[str, Any] = {
    "mtp_prefix": "mtp",
    "mtp_rules": _MTP_RULES,
    "mtp_layer": "mtp.layers.{head}",
    "mtp_heads": 1,
}
_KINDS = ("full_attention", LINEAR)
QWEN3_NEXT = Family(
    "qwen3_next",
    sparse_settings,
    (*_COMMON, *_delta_net(("qkvz", "ba"), "delta_fused"), *ROUTED, *GATED_SHARED),
    layer_kinds=_KINDS,
    **_MTP,
)
# Qwen3.5 and 3.6: on the hub beside a vision tower, or the text model alone.
QWEN3_5_TEXT = Family(
    "qwen3_5_text",
    dense_delta_settings,
    (*_COMMON, *_delta_net(("qkv", "z", "b", "a"), "delta_apart")),
    layer_kinds=_KINDS,
    **_MTP,
)
QWEN3_5 = replace(QWEN3_5_TEXT, model_type="qwen3_5", nested=True)
# Its experts are in the hub's files one by one, or as one tensor of all.
QWEN3_5_MOE_TEXT = Family(
    "qwen3_5_moe_text",
    sparse_settings,
    (*QWEN3_5_TEXT.rules, *ROUTED, *GATED_SHARED),
    layer_kinds=_KINDS,
    **_MTP,
)
QWEN3_5_MOE = replace(QWEN3_5_MOE_TEXT, model_type="qwen3_5_moe", nested=True)
