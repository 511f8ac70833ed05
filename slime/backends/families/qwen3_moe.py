"""Qwen3-MoE: Qwen3 with a mixture of experts in (most) layers."""

from typing import Any

from slime.backends.families import qwen3
from slime.backends.families.base import Family
from slime.backends.families.expert_rules import ROUTED


def settings(hf: Any) -> dict[str, Any]:
    sparse = [
        int(layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0)
        for layer in range(hf.num_hidden_layers)
    ]
    return qwen3.settings(hf) | {
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": sparse,
        "moe_router_topk": hf.num_experts_per_tok,
        # Softmax over the chosen experts is softmax over all, chosen and normalised.
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
    }


FAMILY = Family("qwen3_moe", settings, (*qwen3.FAMILY.rules, *ROUTED))
