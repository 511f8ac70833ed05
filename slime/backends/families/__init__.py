"""Model families as data: what Megatron must build for an HF config, and how the parameters correspond."""

from typing import Any

from slime.backends.families import deepseek_v3, glm4, glm4_moe, kimi_k2, llama, mimo, qwen2, qwen3, qwen3_moe
from slime.backends.families.base import Dims, Family
from slime.catalog.backends import BACKENDS

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, qwen2, qwen3, qwen3_moe, glm4, glm4_moe, deepseek_v3, mimo, kimi_k2)
}
assert tuple(FAMILIES) == BACKENDS["megatron"].families, "the trainer's row names other families"


# Types that transformers has no model of -> what it computes from the same tensors.
COMPUTED_AS = {module.MODEL_TYPE: module.COMPUTED_AS for module in (mimo, kimi_k2)}


def register_configs() -> None:
    """Let transformers read configs of these types in this process."""
    for module in (mimo, kimi_k2):
        module.register_config()


# Types that are asked for and cannot be built, and what is missing.
MISSING = {
    "qwen3_next": "megatron-core 0.16.1 computes its gated delta net layers only with flash-linear-attention "
    "(CUDA), and not for packed sequences",
}


def family_of(hf_config: Any) -> Family:
    """The family of an HF config; ValueError names a type that cannot be trained, and why."""
    kind = hf_config.model_type
    if kind in MISSING:
        raise ValueError(
            f"--train-backend megatron cannot train a {kind} (--hf-checkpoint): {MISSING[kind]}."
        )
    if kind not in FAMILIES:
        raise ValueError(
            f"--train-backend megatron knows no model of type {kind!r} (--hf-checkpoint); it knows "
            f"{', '.join(sorted(FAMILIES))}. Use --train-backend fsdp, or add a file to "
            "slime/backends/families."
        )
    return FAMILIES[kind]


def num_mtp_heads(hf_config: Any) -> int:
    """Number of MTP heads; not every family's config has the field."""
    return getattr(hf_config, "num_nextn_predict_layers", None) or 0


def dims_of(hf_config: Any) -> Dims:
    settings = family_of(hf_config).settings(hf_config)
    return Dims(
        groups=settings["num_query_groups"],
        head_dim=settings["kv_channels"],
        vocab=hf_config.vocab_size,
        layers=settings["num_layers"],
        mtp_heads=num_mtp_heads(hf_config),
    )
