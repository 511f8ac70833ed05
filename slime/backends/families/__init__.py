"""Model families as data: Megatron's settings for an HF config, and the mapping of parameter names."""

from typing import Any

from slime.backends.families.base import DeltaDims, Dims, Family
from slime.backends.families.delta_nets import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)
from slime.backends.families.dense import GLM4, LLAMA, MIMO, QWEN2, QWEN3
from slime.backends.families.mixtures import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    KIMI_K2,
    MINIMAX_M2,
    QWEN3_MOE,
)
from slime.catalog.backends import BACKENDS

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, QWEN2, QWEN3, QWEN3_MOE, GLM4, GLM4_MOE, DEEPSEEK_V3, MIMO, KIMI_K2),
        *(QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5, QWEN3_5_MOE_TEXT, QWEN3_5_MOE),
        *(GLM4_MOE_LITE, MINIMAX_M2, GLM_MOE_DSA, DEEPSEEK_V32),
    )
}
assert tuple(FAMILIES) == BACKENDS["megatron"].families, "the trainer's row names other families"

# Types without a model in transformers (the hub has code for them) -> the type that computes the same, except
# for MTP heads.
COMPUTED_AS = {"mimo": "qwen2", "kimi_k2": "deepseek_v3"}


def register_configs() -> None:
    """Let transformers read configs of these types in this process, as the type that computes the same."""
    # Heavy import, only needed where a model is built.
    from transformers import AutoConfig, DeepseekV3Config, Qwen2Config

    class MimoConfig(Qwen2Config):
        model_type = "mimo"

    class KimiK2Config(DeepseekV3Config):
        model_type = "kimi_k2"

    for kind in (MimoConfig, KimiK2Config):
        AutoConfig.register(kind.model_type, kind, exist_ok=True)


def family_of(hf_config: Any) -> Family:
    """Return the family of an HF config; ValueError names a type that cannot be trained, and why."""
    kind = hf_config.model_type
    if kind not in FAMILIES:
        raise ValueError(
            f"--train-backend megatron knows no model of type {kind!r} (--hf-checkpoint); it knows "
            f"{', '.join(sorted(FAMILIES))}. Use --train-backend fsdp, or add it to "
            "slime/backends/families."
        )
    return FAMILIES[kind]


def num_mtp_heads(hf_config: Any) -> int:
    """Return the number of MTP heads; not every family's config has the field."""
    fields = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    named = (getattr(hf_config, field, None) for field in fields)
    return next((number for number in named if number is not None), family_of(hf_config).mtp_heads)


def dims_of(hf_config: Any) -> Dims:
    settings = family_of(hf_config).settings(hf_config)
    return Dims(
        groups=settings["num_query_groups"],
        head_dim=settings["kv_channels"],
        vocab=hf_config.vocab_size,
        layers=settings["num_layers"],
        mtp_heads=num_mtp_heads(hf_config),
        delta=_delta_dims(settings),
    )


def _delta_dims(settings: dict[str, Any]) -> DeltaDims | None:
    if "linear_num_key_heads" not in settings:
        return None
    heads = settings["linear_num_key_heads"]
    values = settings["linear_num_value_heads"] // heads
    return DeltaDims(heads, settings["linear_key_head_dim"], values, settings["linear_value_head_dim"])
