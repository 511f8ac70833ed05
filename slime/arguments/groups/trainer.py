"""Flags and rules of the trainers: how one model is spread over ranks, what of it trains, and FSDP's own."""

from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, needs, option_of
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES

# -- when flags have an effect
FSDP = needs("train_backend", "fsdp")
# Parameters of the indexer of sparse attention, which chooses the keys that are attended to.
INDEXER = r"\bindexer\b"
ADAPTERS = needs("lora_rank")
OURS = "slime.rollout."  # prefix of the paths of slime's own functions


@dataclass
class ParallelFlags:
    """Parallelism."""

    tensor_model_parallel_size: int = flag(1, "ranks that share every matrix of the model", ge=1)
    context_parallel_size: int = flag(1, "ranks that share the tokens of every sample", ge=1)
    activation_checkpointing: str = flag(
        "none",
        "what the backward pass computes again: nothing, all but matrix products and attention, or layers",
        choices=("none", "selective", "full"),
        alias="--recompute-granularity",
    )
    only_train_params_name_list: list[str] | None = flag(
        None, "train only parameters whose name one of these expressions matches", metavar="REGEX"
    )
    freeze_params_name_list: list[str] | None = flag(
        None, "do not train parameters whose name one of these expressions matches", metavar="REGEX"
    )
    freeze_indexer: bool = flag(False, "the indexers of sparse attention are not trained")


@dataclass
class FSDPFlags:
    """FSDP trainer."""

    fsdp_cpu_offload: bool = flag(
        False, "keep parameters, gradients and moments in host memory", only_with=FSDP
    )
    fsdp_shard_size: int | None = flag(
        None,
        "ranks that share one copy of the parameters; other groups of this size hold replicas. "
        "Default: all data- and context-parallel ranks",
        ge=1,
        only_with=FSDP,
    )
    compile: bool | None = flag(
        None, "compile each decoder layer. Default: on GPUs, at widths from 1024, without tensor parallelism"
    )
    share_prefix: bool | None = flag(
        None,
        "compute a prefix that samples share once. Default: if it saves an eighth of the tokens. "
        "If given, --max-tokens-per-gpu counts shared tokens once",
        only_with=FSDP,
    )
    fp8_training: bool = flag(
        False, "linear layers and experts multiply in FP8. Emulated on a CPU", only_with=FSDP
    )


@dataclass
class AdapterFlags:
    """Low-rank adapters."""

    lora_rank: int = flag(0, "train low-rank adapters of this rank; 0: train the model", ge=0)
    lora_alpha: float = flag(
        32.0, "scale of the adapters: their product is multiplied by alpha / rank", gt=0, only_with=ADAPTERS
    )
    lora_target_modules: list[str] = flag(
        ["all-linear"],
        "layers that get an adapter; all-linear: all but output and routers",
        only_with=ADAPTERS,
    )
    lora_sync: str = flag(
        "merged",
        "engines receive the merged model, or adapters alone",
        choices=("merged", "adapter"),
        only_with=ADAPTERS,
    )


def trainable_parameters(draft: Draft) -> None:
    """Refuse two contradictory lists of parameters, and adapters in addition to a list."""
    if draft.freeze_indexer and not draft.only_train_params_name_list:
        frozen = [*(draft.freeze_params_name_list or []), INDEXER]
        draft.derive("freeze_params_name_list", frozen, "freeze_indexer")
    if draft.only_train_params_name_list and draft.freeze_params_name_list:
        raise ValueError(
            "--only-train-params-name-list and --freeze-params-name-list are both set: keep one."
        )
    if draft.lora_rank and (draft.only_train_params_name_list or draft.freeze_params_name_list):
        raise ValueError("--lora-rank trains adapters only: remove the list of trained or frozen parameters.")
    if draft.lora_rank and draft.enable_mtp_training:
        raise ValueError(
            "--lora-rank trains adapters, and MTP heads have none: remove --enable-mtp-training."
        )
    if draft.lora_sync == "adapter":
        _adapters_alone(draft)


def _adapters_alone(draft: Draft) -> None:
    """Check that requests can name the adapters, and that the engines can load them."""
    transport, mode = draft.update_weight_transport, draft.update_weight_mode
    for holds, why in (
        (
            not draft.debug_rollout_only and not draft.debug_train_only,
            ": a run with only one stage pushes nothing to engines; remove it",
        ),
        (
            transport in ("auto", "tensor"),
            f" with --update-weight-transport {transport}: adapters are sent in memory only; use auto",
        ),
        (
            mode == "full",
            f" with --update-weight-mode {mode}: adapters are sent whole; keep one of them",
        ),
        (
            draft.start_from == draft.hf_checkpoint,
            f" with first weights of {draft.start_from}: engines start from --hf-checkpoint, and adapters "
            "alone do not bring them there; use --lora-sync merged",
        ),
    ):
        if not holds:
            raise ValueError(f"--lora-sync adapter{why}.")
    functions = ("custom_generate_function_path", "rollout_function_path", "eval_function_path")
    own = [name for name in functions if not (getattr(draft, name) or OURS).startswith(OURS)]
    ENGINES[draft.rollout_engine].rules.check_adapter_sync(draft, option_of(own[0]) if own else None)


def model_parallel_sizes(draft: Draft) -> None:
    """Check that the ranks divide into replicas; runs after the sizes are derived."""
    ranks = draft.actor_num_nodes * draft.actor_num_gpus_per_node
    tensor, context = draft.tensor_model_parallel_size, draft.context_parallel_size
    trainer = BACKENDS[draft.train_backend]
    if context > 1 and draft.share_prefix:
        raise ValueError(
            f"--share-prefix with --context-parallel-size {context}: shared prefixes are computed on one "
            "rank; keep one of them."
        )
    if context > 1:  # no rank has the logits of a whole sample
        reason = "needs the logits of whole samples on one rank; use --context-parallel-size 1"
        if draft.loss_type == "custom_loss" or (
            draft.loss_type == "rm_loss" and not trainer.scores_split_samples
        ):
            raise ValueError(f"--loss-type {draft.loss_type} {reason}.")
        if draft.use_opd and draft.opd_kl != "sampled":
            raise ValueError(f"--opd-kl {draft.opd_kl} {reason}.")
    if not trainer.has_pipeline and ranks % (tensor * context):
        raise ValueError(
            f"--tensor-model-parallel-size {tensor} x --context-parallel-size {context} does not divide the "
            f"{ranks} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node)."
        )
    shards = draft.fsdp_shard_size
    if shards and not trainer.has_pipeline and ranks // tensor % shards:
        raise ValueError(
            f"--fsdp-shard-size {shards} does not divide the {ranks // tensor} data- and context-parallel "
            f"ranks ({ranks} trainer ranks / --tensor-model-parallel-size {tensor}): use a size that does, "
            "such as the number of GPUs of a machine."
        )
