"""Rules about the trainer's parallel sizes, and about which parameters train."""

from slime.arguments.core.draft import Draft
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES


def trainable_parameters(draft: Draft) -> None:
    """Two lists that contradict each other, and adapters beside them, are refused."""
    if draft.only_train_params_name_list and draft.freeze_params_name_list:
        raise ValueError(
            "--only-train-params-name-list and --freeze-params-name-list are both set: one says what "
            "trains, the other what does not; keep one."
        )
    chosen = draft.only_train_params_name_list or draft.freeze_params_name_list
    if draft.lora_rank and chosen:
        raise ValueError("--lora-rank trains adapters only: remove the list of trained or frozen parameters.")
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
    engine = ENGINES[draft.rollout_engine]
    if draft.offload_rollout and engine.loses_weights_with_memory:
        raise ValueError(
            f"--lora-sync adapter with --offload-rollout on {engine.label} engines: they lose the model with their "
            "memory, and adapters alone do not bring it back; use --lora-sync merged."
        )
    functions = ("custom_generate_function_path", "rollout_function_path", "eval_function_path")
    own = [
        name
        for name in functions
        if not (getattr(draft, name) or "slime.rollout.").startswith("slime.rollout.")
    ]
    if own and engine.requests_name_adapters:
        flag = "--" + own[0].replace("_", "-")
        raise ValueError(
            f"--lora-sync adapter with {flag} on {engine.label} engines: requests of one's own that do not name the "
            "adapter would be answered by the model without it; use --lora-sync merged."
        )


def weight_copies(draft: Draft) -> None:
    """Copies on the device stay there when the trainer leaves it.
    Runs after placement has decided on that.
    """
    if draft.weight_copies == "device" and draft.offload_train:
        raise ValueError(
            "--weight-copies device with --offload-train: the copies would stay on the device that the "
            "trainer leaves to the engines; use --weight-copies host, or --no-offload-train."
        )


def model_parallel_sizes(draft: Draft) -> None:
    """The ranks must divide into replicas. Runs after the sizes are derived."""
    ranks = draft.actor_num_nodes * draft.actor_num_gpus_per_node
    tensor, context = draft.tensor_model_parallel_size, draft.context_parallel_size
    if context > 1:
        _whole_logits(draft)
    if not BACKENDS[draft.train_backend].has_pipeline and ranks % (tensor * context):
        raise ValueError(
            f"--tensor-model-parallel-size {tensor} x --context-parallel-size {context} does not divide the "
            f"{ranks} trainer "
            "ranks (--actor-num-nodes x --actor-num-gpus-per-node): choose sizes whose product does."
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
