"""Trainers: the rows of `--train-backend`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """`create` gets the arguments of a run, a rank, the number of ranks and a device; returns a `TrainBackend`.

    A path, because a trainer may need packages that are not installed where another one runs.
    """

    create: str
    flags: tuple[str, ...] = ()  # that no other trainer reads
    flags_unread: str = ""  # why such a flag has no effect with another trainer, and the remedy
    takes_megatron_flags: bool = False  # fields of Megatron's configuration, and flags of its layout
    splits_logits: bool = False  # under tensor parallelism no rank has the logits of the whole vocabulary
    has_pipeline: bool = False  # ranks divide into pipeline stages too, by rules of the trainer's own
    scores_split_samples: bool = False  # rm_loss works where context parallelism splits a sample
    reads_kept_checkpoints: bool = False  # also for a model beside the policy, such as the reference
    float32_on_cpu: bool = False  # whatever precision the model is stored in
    weights_in_dtype: bool = (
        False  # --dtype is that of the weights; masters in float32 stand in the optimizer
    )
    trains_transformers_model: bool = False  # its model is that of transformers, not a rewrite


BACKENDS: dict[str, Backend] = {
    "fsdp": Backend(
        "slime.backends.fsdp.create_backend",
        flags=("fsdp_cpu_offload", "router_aux_loss_coef", "lora_rank"),
        flags_unread="only the FSDP trainer reads it; remove it or use --train-backend fsdp",
        reads_kept_checkpoints=True,
        trains_transformers_model=True,
    ),
    "megatron": Backend(
        "slime.backends.megatron.create_backend",
        takes_megatron_flags=True,
        splits_logits=True,
        has_pipeline=True,
        scores_split_samples=True,
        float32_on_cpu=True,
        weights_in_dtype=True,
    ),
}
DEFAULT_BACKEND = "fsdp"
