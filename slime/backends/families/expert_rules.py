"""Mixtures of experts: rules for routed and shared experts, and settings of sigmoid routers."""

from typing import Any

from slime.backends.families.base import in_layer

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
# Which experts are chosen depends on the last bits of this one: hub checkpoints keep it in fp32.
CORRECTION_BIAS = in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "exact")


def sigmoid_settings(hf: Any) -> dict[str, Any]:
    """Routers with sigmoid scores, a bias that only decides who is chosen, and groups of experts."""
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
