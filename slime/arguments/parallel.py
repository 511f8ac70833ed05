"""Flags that both trainers share: how one model is spread over ranks, and what its activations cost."""

from dataclasses import dataclass

from slime.arguments.flag import flag


@dataclass(frozen=True)
class ParallelFlags:
    """Parallelism."""

    tensor_model_parallel_size: int = flag(1, "ranks that share every matrix of the model", ge=1)
    context_parallel_size: int = flag(1, "ranks that share the tokens of every sample", ge=1)
    activation_checkpointing: str = flag(
        "none",
        "what the backward pass computes again instead of keeping: nothing, all but matrix products and attention, or "
        "whole layers",
        choices=("none", "selective", "full"),
        alias="--recompute-granularity",
    )
