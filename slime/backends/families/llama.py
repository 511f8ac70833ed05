"""Llama 2 and 3, and models of that type such as SmolLM2."""

from typing import Any

from slime.backends.families.base import ATTENTION, DENSE_MLP, NORMS, OUTSIDE, Family, dense_settings


def settings(hf: Any) -> dict[str, Any]:
    if hf.attention_bias or hf.mlp_bias:
        raise ValueError("llama with attention_bias or mlp_bias is not supported by the Megatron backend.")
    return dense_settings(hf)


FAMILY = Family("llama", settings, (*OUTSIDE, *NORMS, *ATTENTION, *DENSE_MLP))
