"""Flags that both trainers share: how one model is spread over ranks, what
its activations cost, what of it trains.
"""

from dataclasses import dataclass

from slime.arguments.core.flag import flag


@dataclass
class ParallelFlags:
    """Parallelism."""

    tensor_model_parallel_size: int = flag(1, "ranks that share every matrix of the model", ge=1)
    context_parallel_size: int = flag(1, "ranks that share the tokens of every sample", ge=1)
    activation_checkpointing: str = flag(
        "none",
        "what the backward pass computes again instead of keeping: nothing, all but matrix products and "
        "attention, or whole layers",
        choices=("none", "selective", "full"),
        alias="--recompute-granularity",
    )
    only_train_params_name_list: list[str] | None = flag(
        None,
        "regular expressions: only parameters whose name one of them matches are trained",
        metavar="REGEX",
    )
    freeze_params_name_list: list[str] | None = flag(
        None,
        "regular expressions: parameters whose name one of them matches are not trained",
        metavar="REGEX",
    )
