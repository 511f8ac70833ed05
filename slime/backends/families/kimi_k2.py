"""Kimi-K2: a DeepSeek-V3 under another name.

transformers has no model of this type (the hub holds code for it): its config is read as a DeepSeek-V3's.
"""

from dataclasses import replace

from slime.backends.families import deepseek_v3

MODEL_TYPE = "kimi_k2"
COMPUTED_AS = "deepseek_v3"


def register_config() -> None:
    """Let transformers read configs of this type in this process."""
    # Heavy import, only needed where a model is built.
    from transformers import AutoConfig, DeepseekV3Config

    class KimiK2Config(DeepseekV3Config):
        model_type = MODEL_TYPE

    AutoConfig.register(MODEL_TYPE, KimiK2Config, exist_ok=True)


FAMILY = replace(deepseek_v3.FAMILY, model_type=MODEL_TYPE)
