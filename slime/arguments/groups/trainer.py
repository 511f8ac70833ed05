"""Flags and rules of the trainers: how one model is spread over ranks, what of it trains, and FSDP's own."""

from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, needs, option_of
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES

# -- when flags have an effect
_FSDP = BACKENDS["fsdp"]
FSDP = needs("train_backend", "fsdp")
# Parameters of the part of sparse attention that chooses what is attended to.
INDEXER = r"\bindexer\b"
ADAPTERS = needs("lora_rank")


@dataclass
class ParallelFlags:
    """Parallelism."""

    tensor_model_parallel_size: int = flag(1, "ranks that share every matrix of the model", ge=1)
    context_parallel_size: int = flag(1, "ranks that share the tokens of every sample", ge=1)
    activation_checkpointing: str = flag(
        "none",
        "what the backward pass computes again: nothing, all but matrix products and attention, or whole "
        "layers",
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
    freeze_indexer: bool = flag(False, "the indexers of sparse attention are not trained")


@dataclass
class FSDPFlags:
    """FSDP trainer."""

    fsdp_cpu_offload: bool = flag(
        False, "keep parameters, gradients and optimizer state in host memory", only_with=FSDP
    )
    compile: bool | None = flag(
        None,
        "compile each decoder layer. Default: on GPUs, for models at least 1024 wide without tensor "
        "parallelism",
    )
    share_prefix: bool | None = flag(
        None,
        "compute tokens that samples of a micro-batch share at their start once. Default: where this "
        "saves an eighth of the tokens. If given, --max-tokens-per-gpu counts shared tokens once",
        only_with=FSDP,
    )
    fp8_training: bool = flag(
        False,
        "linear layers of decoder layers multiply in FP8, forward and backward; everything else stays in "
        "--dtype. Emulated on a CPU",
        only_with=FSDP,
    )
    router_aux_loss_coef: float | None = flag(
        None,
        "coefficient of the loss that balances experts within a sample. Default: from the model's config "
        "if it sets output_router_logits, else none",
        ge=0,
        only_with=FSDP,
    )


@dataclass
class AdapterFlags:
    """Low-rank adapters."""

    lora_rank: int = flag(
        0, "train low-rank adapters of this rank instead of the model; 0: train the model", ge=0
    )
    lora_alpha: float = flag(
        32.0, "scale of the adapters: their product is multiplied by alpha / rank", gt=0, only_with=ADAPTERS
    )
    lora_target_modules: list[str] = flag(
        ["all-linear"],
        "names of the layers that get an adapter; all-linear: all but the output layer and expert routers",
        only_with=ADAPTERS,
    )
    lora_sync: str = flag(
        "merged",
        "what engines receive: the model with adapters merged in, or the adapters alone",
        choices=("merged", "adapter"),
        only_with=ADAPTERS,
    )


def trainable_parameters(draft: Draft) -> None:
    """Two lists that contradict each other, and adapters beside them, are refused."""
    if draft.freeze_indexer and not draft.only_train_params_name_list:
        frozen = [*(draft.freeze_params_name_list or []), INDEXER]
        draft.derive("freeze_params_name_list", frozen, "freeze_indexer")
    if draft.only_train_params_name_list and draft.freeze_params_name_list:
        raise ValueError(
            "--only-train-params-name-list and --freeze-params-name-list are both set: one says what "
            "trains, the other what does not; keep one."
        )
    chosen = draft.only_train_params_name_list or draft.freeze_params_name_list
    if draft.lora_rank and chosen:
        raise ValueError("--lora-rank trains adapters only: remove the list of trained or frozen parameters.")
    if draft.lora_rank and draft.enable_mtp_training:
        raise ValueError(
            "--lora-rank trains adapters only, and MTP heads have none: remove --enable-mtp-training."
        )
    if draft.lora_sync == "adapter":
        _adapters_alone(draft)


def _adapters_alone(draft: Draft) -> None:
    """Requests must name the adapters, and the engines must be able to take them."""
    if draft.debug_rollout_only or draft.debug_train_only:
        raise ValueError(
            "--lora-sync adapter: a run with only one stage pushes nothing to engines; remove it."
        )
    if draft.update_weight_transport not in ("auto", "tensor"):
        raise ValueError(
            f"--lora-sync adapter with --update-weight-transport {draft.update_weight_transport}: adapters "
            "alone go in memory only; use auto, or --lora-sync merged."
        )
    if draft.update_weight_mode != "full":
        raise ValueError(
            f"--lora-sync adapter with --update-weight-mode {draft.update_weight_mode}: adapters go whole; "
            "keep one of them."
        )
    if draft.start_from != draft.hf_checkpoint:
        raise ValueError(
            f"--lora-sync adapter with first weights of {draft.start_from}: engines start from "
            "--hf-checkpoint, and adapters alone do not bring them there; use --lora-sync merged."
        )
    functions = ("custom_generate_function_path", "rollout_function_path", "eval_function_path")
    own = [
        option_of(name)
        for name in functions
        if not (getattr(draft, name) or "slime.rollout.").startswith("slime.rollout.")
    ]
    ENGINES[draft.rollout_engine].rules.check_adapter_sync(draft, own[0] if own else None)


def model_parallel_sizes(draft: Draft) -> None:
    """The ranks must divide into replicas. Runs after the sizes are derived."""
    ranks = draft.actor_num_nodes * draft.actor_num_gpus_per_node
    tensor, context = draft.tensor_model_parallel_size, draft.context_parallel_size
    if context > 1:
        _whole_logits(draft)
    if not BACKENDS[draft.train_backend].has_pipeline and ranks % (tensor * context):
        raise ValueError(
            f"--tensor-model-parallel-size {tensor} x --context-parallel-size {context} does not divide the "
            f"{ranks} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node): choose sizes whose "
            "product does."
        )


def _whole_logits(draft: Draft) -> None:
    """Under context parallelism no rank has the logits of a whole sample."""
    reason = "needs the logits of whole samples on one rank; use --context-parallel-size 1"
    if draft.loss_type == "custom_loss":
        raise ValueError(f"--loss-type custom_loss {reason}.")
    if draft.use_opd and draft.opd_kl == "full":
        raise ValueError(f"--opd-kl full {reason}.")
    if draft.loss_type == "rm_loss" and not BACKENDS[draft.train_backend].scores_split_samples:
        raise ValueError(
            "--loss-type rm_loss reads the last token of whole samples; use --context-parallel-size 1."
        )
