"""GLM-4: Llama with biases on query, key and value, norms around each branch, interleaved rotation.

Only a part of each head is rotated; how much, the angles that come with a micro-batch say.
"""

from typing import Any

from slime.backends.families.base import (
    ATTENTION,
    NORMS,
    OUTSIDE,
    Family,
    dense_settings,
    in_layer,
    qkv,
)

BRANCH_NORMS = (
    in_layer("self_attn_bda.weight", "post_self_attn_layernorm.weight", "replicated"),
    in_layer("mlp_bda.weight", "post_mlp_layernorm.weight", "replicated"),
)
FUSED_MLP = (
    in_layer("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", "fused_gate_up"),
    in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "row"),
)


def settings(hf: Any) -> dict[str, Any]:
    return dense_settings(hf) | {"add_qkv_bias": hf.attention_bias, "rotary_interleaved": True}


FAMILY = Family(
    "glm4",
    settings,
    (*OUTSIDE, *NORMS, *BRANCH_NORMS, *ATTENTION, qkv("bias"), *FUSED_MLP),
    branch_norms=True,
)
