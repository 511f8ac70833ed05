"""Qwen3, dense: the Llama line with a norm on each head's query and key."""

from typing import Any

from slime.backends.families.base import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
    OUTSIDE,
    QK_NORMS,
    Family,
    dense_settings,
)


def settings(hf: Any) -> dict[str, Any]:
    if hf.attention_bias:
        raise ValueError("qwen3 with attention_bias is not supported by the Megatron backend.")
    return dense_settings(hf) | {"qk_layernorm": True}


FAMILY = Family("qwen3", settings, (*OUTSIDE, *NORMS, *ATTENTION, *QK_NORMS, *DENSE_MLP))
