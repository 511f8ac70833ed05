"""Flags of the FSDP trainer alone: offload, compilation and LoRA."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag


@dataclass
class FSDPFlags:
    """FSDP trainer."""

    fsdp_cpu_offload: bool = flag(False, "keep parameters, gradients and optimizer state in host memory")
    compile: bool | None = flag(
        None,
        "compile each decoder layer; default: on GPUs, for dense models at least 1024 wide that no tensor "
        "parallelism cuts",
    )
    router_aux_loss_coef: float | None = flag(
        None,
        "coefficient of a loss that evens out the use of experts within each sample; default: that of the "
        "model's config where it sets output_router_logits, else none",
        ge=0,
    )
    lora_rank: int = flag(
        0, "train low-rank adapters of this rank instead of the model; 0: train the model", ge=0
    )
    lora_alpha: float = flag(32.0, "scale of the adapters: their product is multiplied by alpha / rank", gt=0)
    lora_target_modules: list[str] = flag(
        ["all-linear"],
        "names of the layers that get an adapter, or all-linear for every one but the output layer",
    )
    lora_sync: str = flag(
        "merged",
        "what engines get; merged: the whole model with the adapters' products added; adapter: the adapters "
        "alone, for engines that started with --hf-checkpoint",
        choices=("merged", "adapter"),
    )
