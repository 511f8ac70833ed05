"""Dense families: Llama and its relatives, with their differences."""

from typing import Any

from slime.backends.families.base import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
    OUTSIDE,
    QK_NORMS,
    Family,
    dense_settings,
    in_layer,
    mtp_rules,
    qkv,
    refuse_biases,
)


def llama_settings(hf: Any) -> dict[str, Any]:
    refuse_biases(hf, "attention_bias", "mlp_bias")
    return dense_settings(hf)


def qwen2_settings(hf: Any) -> dict[str, Any]:
    return dense_settings(hf) | {"add_qkv_bias": True}


def qwen3_settings(hf: Any) -> dict[str, Any]:
    refuse_biases(hf, "attention_bias")
    return dense_settings(hf) | {"qk_layernorm": True}


def glm4_settings(hf: Any) -> dict[str, Any]:
    # Only a part of each head is rotated; its size follows from the angles of a micro-batch.
    return dense_settings(hf) | {"add_qkv_bias": hf.attention_bias, "rotary_interleaved": True}


# Llama 2 and 3, and models of that type such as SmolLM2.
LLAMA = Family("llama", llama_settings, (*OUTSIDE, *NORMS, *ATTENTION, *DENSE_MLP))
# Qwen2 and Qwen2.5: biases on query, key and value.
QWEN2 = Family("qwen2", qwen2_settings, (*OUTSIDE, *NORMS, *ATTENTION, qkv("bias"), *DENSE_MLP))
# Qwen3: a norm on each head's query and key.
QWEN3 = Family("qwen3", qwen3_settings, (*OUTSIDE, *NORMS, *ATTENTION, *QK_NORMS, *DENSE_MLP))
# GLM-4: biases on query, key and value, norms around each branch, interleaved rotation.
GLM4 = Family(
    "glm4",
    glm4_settings,
    (
        *(*OUTSIDE, *NORMS, *ATTENTION, qkv("bias")),
        in_layer("self_attn_bda.weight", "post_self_attn_layernorm.weight", "replicated"),
        in_layer("mlp_bda.weight", "post_mlp_layernorm.weight", "replicated"),
        in_layer("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", "fused_gate_up"),
        in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "row"),
    ),
    branch_norms=True,
)
_MIMO_HEADS = "model.mtp_layers.{head}"
# MiMo-7B: Qwen2 with MTP heads, which put the hidden state before the embedding, Megatron's after it.
MIMO = Family(
    "mimo",
    qwen2_settings,
    QWEN2.rules,
    mtp_prefix=_MIMO_HEADS,
    mtp_rules=mtp_rules(
        _MIMO_HEADS, "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "swapped"
    ),
)
