"""Qwen2 and Qwen2.5: the Llama line with biases on query, key and value."""

from typing import Any

from slime.backends.families.base import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
    OUTSIDE,
    Family,
    dense_settings,
    qkv,
)


def settings(hf: Any) -> dict[str, Any]:
    return dense_settings(hf) | {"add_qkv_bias": True}


FAMILY = Family("qwen2", settings, (*OUTSIDE, *NORMS, *ATTENTION, qkv("bias"), *DENSE_MLP))
