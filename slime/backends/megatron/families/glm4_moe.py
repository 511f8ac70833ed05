"""GLM-4.5, 4.6 and 4.7: dense layers first, then mixtures with shared
experts; a part of each head is rotated.
"""

from typing import Any

from slime.backends.megatron.families.base import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
    OUTSIDE,
    QK_NORMS,
    Family,
    dense_settings,
    joints,
    qkv,
)
from slime.backends.megatron.families.experts import CORRECTION_BIAS, ROUTED, SHARED, sigmoid_settings

HEADS = "model.layers.{beyond}"


def settings(hf: Any) -> dict[str, Any]:
    return (
        dense_settings(hf)
        | sigmoid_settings(hf)
        | {"add_qkv_bias": hf.attention_bias, "qk_layernorm": hf.use_qk_norm}
    )


FAMILY = Family(
    "glm4_moe",
    settings,
    (
        *OUTSIDE,
        *NORMS,
        *ATTENTION,
        qkv("bias"),
        *QK_NORMS,
        *DENSE_MLP,
        *ROUTED,
        *SHARED,
        CORRECTION_BIAS,
    ),
    heads=HEADS,
    joints=joints(HEADS, "enorm", "hnorm", "eh_proj", "shared_head.norm", "column"),
)
