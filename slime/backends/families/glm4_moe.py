"""GLM-4.5, 4.6 and 4.7: dense layers, then mixtures with shared experts; each head is partly rotated."""

from typing import Any

from slime.backends.families.base import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
    OUTSIDE,
    QK_NORMS,
    Family,
    dense_settings,
    mtp_rules,
    qkv,
)
from slime.backends.families.expert_rules import CORRECTION_BIAS, ROUTED, SHARED, sigmoid_settings

MTP_PREFIX = "model.layers.{beyond}"


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
    mtp_prefix=MTP_PREFIX,
    mtp_rules=mtp_rules(MTP_PREFIX, "enorm", "hnorm", "eh_proj", "shared_head.norm", "column"),
)
