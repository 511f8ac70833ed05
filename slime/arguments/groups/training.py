"""Flags about the training step: model precision, batch sizes and
how samples are packed into micro-batches.
"""

from dataclasses import dataclass

from slime.arguments.core.flag import flag
from slime.catalog.backends import BACKENDS, DEFAULT_BACKEND


@dataclass
class TrainingFlags:
    """Training."""

    train_backend: str = flag(
        DEFAULT_BACKEND, "trainer implementation", choices=tuple(BACKENDS), alias="--backend"
    )
    dtype: str = flag(
        "auto",
        "compute precision (master weights are float32); auto: bfloat16 where the device has units for it, "
        "else float32; on a CPU only for models stored in 16 bits",
        choices=("auto", "float32", "bfloat16"),
    )
    global_batch_size: int | None = flag(
        None, "samples per optimizer step; default: all samples of one rollout", ge=1
    )
    num_steps_per_rollout: int | None = flag(
        None, "optimizer steps per rollout; sets --global-batch-size", ge=1
    )
    micro_batch_size: int = flag(1, "samples per forward pass (without --use-dynamic-batch-size)", ge=1)
    use_dynamic_batch_size: bool = flag(False, "fill micro-batches by tokens instead of by number of samples")
    max_tokens_per_gpu: int | None = flag(
        None, "tokens of one micro-batch with --use-dynamic-batch-size", ge=1
    )
    balance_data: bool = flag(False, "balance estimated work over data-parallel ranks")
    balance_by_flops: bool = flag(False, "balance micro-batches by estimated work too; sets --balance-data")
    calculate_per_token_loss: bool = flag(
        False, "mean over all tokens of a step instead of over its rollouts"
    )
    log_probs_chunk_size: int = flag(-1, "tokens per chunk of log-probs and entropy; -1: one chunk", ge=-1)
    logits_memory_gib: float = flag(
        0.0,
        "GiB in which a micro-batch may keep its logits for the backward pass, which else computes them again",
        ge=0,
    )
    weight_copies: str = flag(
        "host",
        "where the weights of a reference, an old actor or a teacher are kept while they are not in use",
        choices=("host", "device"),
    )
    rollout_data_postprocess_path: str | None = flag(
        None, "function that edits the train data on every rank before training", metavar="PATH"
    )
