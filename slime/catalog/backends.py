"""Trainers: the rows of `--train-backend`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """One trainer. `create`: a function of arguments, rank, number of ranks and device."""

    create: str
    help: str
    takes_megatron_flags: bool = False  # fields of Megatron's configuration, and flags of its layout
    has_pipeline: bool = False  # ranks can be pipeline stages
    scores_split_samples: bool = False  # rm_loss works where context parallelism splits a sample
    reads_kept_checkpoints: bool = False  # also for models other than the policy, such as the reference
    folder_per_machine: bool = False  # ranks of one checkpoint may write to folders of their own
    rounds_weights: bool = False  # in its forward pass, to the numbers of INT4 engines
    scales_loss: bool = False  # float16: gradients of an unscaled loss vanish in it
    float32_on_cpu: bool = False  # whatever precision the model is stored in
    # --dtype is that of the weights; the optimizer holds float32 master weights.
    weights_in_dtype: bool = False
    trains_transformers_model: bool = False  # its model is that of transformers, not a rewrite
    shares_prompts: bool = False  # a prompt of several samples in a micro-batch is computed once
    skips_backward: bool = False  # no backward pass for a micro-batch without a gradient
    trains_heads: bool = False  # trains MTP heads, with which an engine drafts tokens
    families: tuple[str, ...] | None = None  # model types that it builds; None: whatever transformers has
    package: str | None = None  # module that has to be installed
    extra: str | None = None  # the extra of slime-rl that installs it


_REBUILT = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3", "mimo", "kimi_k2"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"),
    *("glm4_moe_lite", "minimax_m2", "glm_moe_dsa", "deepseek_v32"),
)
BACKENDS: dict[str, Backend] = {
    "fsdp": Backend(
        "slime.backends.fsdp.create_backend",
        "any causal LM of transformers, sharded by PyTorch's FSDP",
        reads_kept_checkpoints=True,
        folder_per_machine=True,
        rounds_weights=True,
        scales_loss=True,
        trains_transformers_model=True,
        shares_prompts=True,
        skips_backward=True,
    ),
    "megatron": Backend(
        "slime.backends.megatron.create_backend",
        "model families rebuilt from Megatron-Core's modules",
        takes_megatron_flags=True,
        has_pipeline=True,
        scores_split_samples=True,
        float32_on_cpu=True,
        weights_in_dtype=True,
        trains_heads=True,
        families=_REBUILT,
        package="megatron.core",
        extra="megatron",
    ),
}
DEFAULT_BACKEND = "fsdp"
