"""MiMo-7B: Qwen2 with heads that predict further tokens.

transformers has no model of this type (the hub holds code for it), so its config is read as that of a Qwen2.
"""

from typing import Any

from slime.backends.megatron.families import qwen2
from slime.backends.megatron.families.base import Family, joints

MODEL_TYPE = "mimo"
COMPUTED_AS = "qwen2"  # what transformers computes from the same tensors, but for the heads
HEADS = "model.mtp_layers.{head}"


def register_config() -> None:
    """Let transformers read configs of this type in this process."""
    # Heavy import, only needed where a model is built.
    from transformers import AutoConfig, Qwen2Config

    class MimoConfig(Qwen2Config):
        model_type = MODEL_TYPE

    AutoConfig.register(MODEL_TYPE, MimoConfig, exist_ok=True)


def settings(hf: Any) -> dict[str, Any]:
    return qwen2.settings(hf)


FAMILY = Family(
    MODEL_TYPE,
    settings,
    qwen2.FAMILY.rules,
    heads=HEADS,
    # Its heads put the hidden state before the embedding, Megatron's after it.
    joints=joints(HEADS, "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "swapped"),
)
