"""Flags that would have no effect beside the others: refused when a user gave them a value that was meant to do something."""

from collections.abc import Callable
from dataclasses import dataclass

from slime.arguments.draft import Draft
from slime.arguments.groups import all_specs


@dataclass(frozen=True)
class NoEffect:
    """`flags` do something only where `works` holds; `reason` completes the sentence "--x is 3, but ..."."""

    flags: tuple[str, ...]
    works: Callable[[Draft], bool]
    reason: str


NO_EFFECT = (
    NoEffect(
        ("kl_loss_coef", "use_unbiased_kl"),
        lambda d: d.use_kl_loss,
        "the loss has no KL term without --use-kl-loss; add it",
    ),
    NoEffect(
        ("kl_loss_type",),
        lambda d: d.use_kl_loss or d.kl_coef != 0,
        "no KL is computed without --use-kl-loss; add it",
    ),
    NoEffect(
        ("use_kl_loss", "entropy_coef", "eps_clip", "eps_clip_high", "eps_clip_c", "use_rollout_logprobs"),
        lambda d: d.loss_type != "sft_loss",
        "--loss-type sft_loss is plain cross entropy; remove it or use policy_loss",
    ),
    NoEffect(
        ("custom_loss_function_path",),
        lambda d: d.loss_type == "custom_loss",
        "only --loss-type custom_loss calls it; add that",
    ),
    NoEffect(
        ("custom_advantage_function_path", "normalize_advantages"),
        lambda d: d.compute_advantages_and_returns,
        "--disable-compute-advantages-and-returns leaves advantages out; remove one of them",
    ),
    NoEffect(
        ("mask_offpolicy_in_partial_rollout",),
        lambda d: d.partial_rollout,
        "no response spans two policies without --partial-rollout; add it",
    ),
    NoEffect(
        ("max_tokens_per_gpu",),
        lambda d: d.use_dynamic_batch_size,
        "micro-batches are filled by tokens only with --use-dynamic-batch-size; add it",
    ),
    NoEffect(
        ("micro_batch_size",),
        lambda d: not d.use_dynamic_batch_size,
        "--use-dynamic-batch-size fills micro-batches by tokens (--max-tokens-per-gpu); remove one of them",
    ),
    NoEffect(
        ("min_lr", "lr_decay_iters"),
        lambda d: d.lr_decay_style != "constant",
        "--lr-decay-style constant never decays; choose linear or cosine",
    ),
    NoEffect(
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda d: d.optimizer == "adam",
        "--optimizer sgd has no moments; remove it",
    ),
    NoEffect(
        ("skip_eval_before_train",),
        lambda d: d.eval_interval is not None,
        "nothing is evaluated without --eval-interval; add it",
    ),
    NoEffect(
        ("rm_url",),
        # The metadata of a row may ask for remote_rm, and a function of the user's own may read the address.
        lambda d: d.rm_type is None or d.rm_type.endswith("remote_rm") or d.custom_rm_path is not None,
        "only --rm-type remote_rm calls it; use that",
    ),
    NoEffect(
        ("tb_project_name", "tb_experiment_name"),
        lambda d: d.use_tensorboard,
        "TensorBoard is off; add --use-tensorboard",
    ),
    NoEffect(
        (
            "wandb_mode",
            "wandb_dir",
            "wandb_key",
            "wandb_host",
            "wandb_team",
            "wandb_group",
            "wandb_project",
            "wandb_run_id",
            "wandb_random_suffix",
        ),
        lambda d: d.use_wandb,
        "Weights & Biases is off; add --use-wandb",
    ),
    NoEffect(
        ("load_debug_rollout_data_subsample",),
        lambda d: d.load_debug_rollout_data is not None,
        "no dump is replayed; add --load-debug-rollout-data",
    ),
    NoEffect(("ckpt_step", "finetune"), lambda d: d.load is not None, "no checkpoint is loaded; add --load"),
    NoEffect(
        ("update_weight_disk_dir",),
        lambda d: d.update_weight_transport == "disk",
        "weights travel in memory; add --update-weight-transport disk",
    ),
    NoEffect(
        ("rollout_shuffle", "rollout_max_prompt_len"),
        lambda d: d.rollout_global_dataset,
        "--disable-rollout-global-dataset leaves the prompts to your rollout function; remove one of them",
    ),
    NoEffect(
        ("rollout_health_check_interval", "rollout_health_check_timeout", "rollout_health_check_first_wait"),
        lambda d: d.use_fault_tolerance,
        "engines are probed only with --use-fault-tolerance; add it",
    ),
)


def refuse_flags_without_effect(draft: Draft) -> None:
    for entry in NO_EFFECT:
        if entry.works(draft):
            continue
        for name in entry.flags:
            spec, value = all_specs()[name], getattr(draft, name)
            if draft.was_given(name) and value != spec.default:
                shown = "set" if spec.kind is bool or spec.info.secret else f"{value}"
                raise ValueError(f"{spec.option} is {shown}, but {entry.reason}.")
