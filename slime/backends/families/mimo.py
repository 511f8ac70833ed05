"""MiMo-7B: Qwen2 with MTP heads.

transformers has no model of this type (the hub holds code for it), so its config is read as that of a Qwen2.
"""

from slime.backends.families import qwen2
from slime.backends.families.base import Family, mtp_rules

MODEL_TYPE = "mimo"
COMPUTED_AS = "qwen2"  # what transformers computes from the same tensors, but for the MTP heads
MTP_PREFIX = "model.mtp_layers.{head}"


def register_config() -> None:
    """Let transformers read configs of this type in this process."""
    # Heavy import, only needed where a model is built.
    from transformers import AutoConfig, Qwen2Config

    class MimoConfig(Qwen2Config):
        model_type = MODEL_TYPE

    AutoConfig.register(MODEL_TYPE, MimoConfig, exist_ok=True)


FAMILY = Family(
    MODEL_TYPE,
    qwen2.settings,
    qwen2.FAMILY.rules,
    mtp_prefix=MTP_PREFIX,
    # Its MTP heads put the hidden state before the embedding, Megatron's after it.
    mtp_rules=mtp_rules(
        MTP_PREFIX, "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "swapped"
    ),
)
