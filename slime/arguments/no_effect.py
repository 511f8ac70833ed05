"""Flags that would have no effect beside the others: refused when a user gave
them a value that was meant to do something.
"""

from collections.abc import Callable
from dataclasses import dataclass

from slime.arguments.all_flags import all_specs
from slime.arguments.core.draft import Draft
from slime.arguments.groups.objectives import PAIR_LOSSES, SUPERVISED_LOSSES
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.policy_losses import POLICY_LOSSES
from slime.catalog.rewards import REWARDS, find_reward


@dataclass(frozen=True)
class NoEffect:
    """`flags` do something only where `works` holds; `reason` completes the sentence "--x is 3, but ..."."""

    flags: tuple[str, ...]
    works: Callable[[Draft], bool]
    reason: str


def _losses_by_flags() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Flags of some policy losses alone -> these losses."""
    readers: dict[tuple[str, ...], tuple[str, ...]] = {}
    for name, row in POLICY_LOSSES.items():
        if row.flags:
            readers[row.flags] = (*readers.get(row.flags, ()), name)
    return readers


NO_EFFECT = (
    NoEffect(
        ("router_python", "sglang_router_request_timeout_secs"),
        lambda d: (
            d.rollout_router == "sglang" or d.router_options or d.prefill_num_servers or d.sglang_config
        ),
        "the built-in balancer does not read it; use --rollout-router sglang",
    ),
    NoEffect(
        ("kl_loss_coef", "use_unbiased_kl"),
        lambda d: d.use_kl_loss,
        "the loss has no KL term without --use-kl-loss; add it",
    ),
    NoEffect(
        ("logits_memory_gib",),
        lambda d: not BACKENDS[d.train_backend].splits_logits or d.tensor_model_parallel_size == 1,
        "no rank of Megatron's has whole logits with --tensor-model-parallel-size above 1; remove it",
    ),
    NoEffect(
        ("mtp_loss_scaling_factor",),
        lambda d: d.enable_mtp_training,
        "heads that predict further tokens train only with --enable-mtp-training; add it",
    ),
    NoEffect(
        ("kl_loss_type",),
        lambda d: d.use_kl_loss or d.kl_coef != 0,
        "no KL is computed without --use-kl-loss; add it",
    ),
    NoEffect(
        ("use_kl_loss", "entropy_coef", "eps_clip", "eps_clip_high", "eps_clip_c", "use_rollout_logprobs"),
        lambda d: d.loss_type not in SUPERVISED_LOSSES,
        "this --loss-type has no policy ratios, no entropy and no KL term; remove it or use policy_loss",
    ),
    NoEffect(
        ("use_rollout_logprobs",),
        lambda d: d.loss_type == "policy_loss" or d.compute_advantages_and_returns,
        "no old policy is asked for without advantages; remove it",
    ),
    NoEffect(
        (
            "policy_loss_type",
            "custom_policy_loss_function_path",
            "use_tis",
            "use_rs",
            "use_opsm",
            "get_mismatch_metrics",
            "skip_on_policy_check",
            "use_rollout_entropy",
            "custom_pg_loss_reducer_function_path",
        ),
        lambda d: d.loss_type == "policy_loss",
        "only --loss-type policy_loss has policy ratios; remove it",
    ),
    NoEffect(
        ("logprob_diff_threshold",),
        lambda d: d.loss_type not in SUPERVISED_LOSSES,
        "the samples of this --loss-type are not the policy's own; remove it",
    ),
    NoEffect(
        ("policy_loss_type",),
        lambda d: d.custom_policy_loss_function_path is None,
        "--custom-policy-loss-function-path replaces it; remove one of them",
    ),
    NoEffect(
        ("eps_clip", "eps_clip_high"),
        lambda d: POLICY_LOSSES[d.policy_loss_type].clips or d.custom_policy_loss_function_path is not None,
        "this --policy-loss-type clips no ratio; remove it",
    ),
    NoEffect(
        ("eps_clip_c",),
        lambda d: (
            POLICY_LOSSES[d.policy_loss_type].dual_clips or d.custom_policy_loss_function_path is not None
        ),
        "this --policy-loss-type has no dual clip; remove it",
    ),
    *(
        NoEffect(
            flags,
            lambda d, types=types: (
                d.policy_loss_type in types or d.custom_policy_loss_function_path is not None
            ),
            f"only --policy-loss-type {' or '.join(types)} reads it; use that",
        )
        for flags, types in _losses_by_flags().items()
    ),
    NoEffect(
        ("grpo_std_normalization",),
        lambda d: ESTIMATORS[d.advantage_estimator].scale_rewards and d.rewards_normalization,
        "no reward is divided by a group's standard deviation here (only grpo, gspo and cispo do); remove it",
    ),
    NoEffect(
        ("rewards_normalization",),
        lambda d: ESTIMATORS[d.advantage_estimator].baseline is not None,
        "this --advantage-estimator compares no rewards; remove it",
    ),
    NoEffect(
        ("rewards_normalization", "grpo_std_normalization"),
        lambda d: d.custom_reward_post_process_path is None,
        "--custom-reward-post-process-path replaces the comparison of rewards; remove one of them",
    ),
    NoEffect(
        (
            *(
                "advantage_estimator",
                "custom_advantage_function_path",
                "normalize_advantages",
                "rewards_normalization",
            ),
            *("grpo_std_normalization", "kl_coef", "gamma", "lambd"),
        ),
        lambda d: d.loss_type not in SUPERVISED_LOSSES,
        "this --loss-type has no advantages; remove it",
    ),
    NoEffect(
        ("gamma",),
        lambda d: (
            ESTIMATORS[d.advantage_estimator].uses_gamma or d.custom_advantage_function_path is not None
        ),
        "this --advantage-estimator discounts nothing; remove it",
    ),
    NoEffect(
        ("lambd",),
        lambda d: d.advantage_estimator == "ppo" or d.custom_advantage_function_path is not None,
        "only --advantage-estimator ppo has it; remove it",
    ),
    NoEffect(
        ("loss_denominator",),
        lambda d: d.loss_reduction == "constant",
        "no constant divides the loss; add --loss-reduction constant",
    ),
    NoEffect(
        ("tis_clip", "tis_clip_low", "tis_level", "tis_mode", "tis_batch_normalize"),
        lambda d: d.use_tis or d.custom_tis_function_path is not None,
        "no importance weights are used; add --use-tis",
    ),
    NoEffect(
        ("tis_clip_low",),
        lambda d: d.tis_mode != "truncate" or d.custom_tis_function_path is not None,
        "--tis-mode truncate has no lower bound; use clip or mask",
    ),
    NoEffect(
        ("custom_tis_function_path",),
        lambda d: d.use_tis or d.get_mismatch_metrics,
        "nothing calls it; add --use-tis or --get-mismatch-metrics",
    ),
    NoEffect(
        ("tis_level", "tis_mode", "tis_batch_normalize"),
        lambda d: d.custom_tis_function_path is None,
        "--custom-tis-function-path replaces the built-in weights; remove one of them",
    ),
    NoEffect(
        ("rs_level", "rs_upper", "rs_lower", "rs_veto"),
        lambda d: d.use_rs,
        "nothing is rejected; add --use-rs",
    ),
    NoEffect(("opsm_delta",), lambda d: d.use_opsm, "no sample is masked; add --use-opsm"),
    NoEffect(
        ("use_opsm",),
        lambda d: d.use_rollout_logprobs or d.keep_old_actor or d.num_steps_per_rollout > 1,
        "the only optimizer step of a rollout starts at the old policy, so no sample has drifted from it; "
        "take several "
        "(--num-steps-per-rollout) or the engine's log-probs as the old policy (--use-rollout-logprobs)",
    ),
    NoEffect(
        ("overlong_penalty_factor",),
        lambda d: d.overlong_buffer_len is not None,
        "long responses cost nothing; add --overlong-buffer-len",
    ),
    NoEffect(
        ("overlong_buffer_len", "reward_weights"),
        lambda d: d.loss_type not in SUPERVISED_LOSSES and d.custom_reward_post_process_path is None,
        "rewards are not shaped here (supervised losses have none; --custom-reward-post-process-path makes "
        "its own); remove it",
    ),
    NoEffect(
        ("custom_loss_function_path",),
        lambda d: d.loss_type == "custom_loss",
        "only --loss-type custom_loss calls it; add that",
    ),
    NoEffect(
        (
            *(
                "advantage_estimator",
                "custom_advantage_function_path",
                "normalize_advantages",
                "kl_coef",
                "gamma",
            ),
            *("lambd", "rewards_normalization", "grpo_std_normalization", "overlong_buffer_len"),
        ),
        lambda d: d.compute_advantages_and_returns,
        "--disable-compute-advantages-and-returns leaves advantages out; remove one of them",
    ),
    NoEffect(
        ("max_weight_staleness",),
        lambda d: d.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION,
        "the default rollout function keeps nothing in flight; use "
        "fully_async_rollout.generate_rollout_fully_async",
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
    *(
        NoEffect(row.flags, lambda d, row=row: BACKENDS[d.train_backend] is row, row.flags_unread)
        for row in BACKENDS.values()
    ),
    NoEffect(
        ("lora_alpha", "lora_target_modules", "lora_sync"),
        lambda d: d.lora_rank > 0,
        "no adapters are trained; add --lora-rank",
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
        ("skip_eval_before_train", "eval_num_engines"),
        lambda d: d.eval_interval is not None,
        "nothing is evaluated without --eval-interval; add it",
    ),
    NoEffect(
        ("rm_url",),
        # The metadata of a row may ask for remote_rm, and a function of the user's own may read the address.
        lambda d: d.custom_rm_path is not None or (find_reward(d.rm_type) or REWARDS["remote_rm"]).is_remote,
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
    *(
        NoEffect(kind.flags, lambda d, kind=kind: ENGINES[d.rollout_engine] is kind, kind.flags_unread)
        for kind in ENGINES.values()
    ),
    NoEffect(
        ("update_weight_disk_dir", "update_weight_disk_keep_files", "custom_update_weight_post_write_path"),
        lambda d: d.update_weight_transport == "disk" or d.update_weight_mode == "delta",
        "weights travel in memory; add --update-weight-transport disk",
    ),
    NoEffect(
        (
            *("update_weight_delta_encoding", "update_weight_delta_checksum"),
            *("update_weight_local_checkpoint_dir", "weight_agent_addrs"),
        ),
        lambda d: d.update_weight_mode == "delta",
        "whole weights travel; add --update-weight-mode delta",
    ),
    NoEffect(
        ("rollout_shuffle", "rollout_max_prompt_len"),
        lambda d: d.rollout_global_dataset,
        "--disable-rollout-global-dataset leaves the prompts to your rollout function; remove one of them",
    ),
    NoEffect(
        tuple(f"rollout_health_check_{name}" for name in ("interval", "timeout", "first_wait", "failures")),
        lambda d: d.use_fault_tolerance,
        "engines are probed only with --use-fault-tolerance; add it",
    ),
)


NO_EFFECT_BESIDE = (
    NoEffect(
        (
            *("critic_load", "critic_lr", "critic_min_lr", "critic_lr_decay_style", "critic_lr_warmup_iters"),
            *("critic_clip_grad", "value_clip", "num_critic_only_steps"),
        ),
        lambda d: d.loss_type not in SUPERVISED_LOSSES and d.advantage_estimator == "ppo",
        "there is no critic; only --advantage-estimator ppo trains one",
    ),
    NoEffect(
        ("critic_min_lr",),
        lambda d: d.critic_lr_decay_style != "constant",
        "--critic-lr-decay-style constant never decays; choose linear or cosine",
    ),
    NoEffect(
        ("opd_type", "opd_kl", "opd_kl_coef", "opd_teacher_load"),
        lambda d: d.use_opd,
        "there is no distillation; add --use-opd",
    ),
    NoEffect(
        ("opd_teacher_load",),
        lambda d: d.opd_type == "trainer",
        "the teacher is an engine; use --opd-type trainer",
    ),
    NoEffect(
        ("dpo_beta", "dpo_label_smoothing"),
        lambda d: d.loss_type == "dpo_loss",
        "only --loss-type dpo_loss has it; add that",
    ),
    NoEffect(
        ("calculate_per_token_loss", "loss_reduction"),
        lambda d: d.loss_type not in PAIR_LOSSES,
        "a preference loss counts pairs, not tokens; remove it",
    ),
    NoEffect(
        ("ref_load", "ref_update_interval"),
        lambda d: d.loss_type == "dpo_loss" or d.use_kl_loss or d.kl_coef != 0,
        "there is no reference; add --use-kl-loss (without --kl-loss-coef the KL is only reported)",
    ),
    NoEffect(
        ("weight_copies",),
        lambda d: (
            d.loss_type == "dpo_loss" or d.use_kl_loss or d.kl_coef != 0 or d.keep_old_actor or d.use_opd
        ),
        "no weights beside the policy's are kept without a KL, --keep-old-actor or --use-opd; remove it",
    ),
    NoEffect(
        ("keep_old_actor",),
        lambda d: d.loss_type == "policy_loss" and not d.use_rollout_logprobs,
        "old log-probs are not computed by the trainer here; remove it",
    ),
)


def refuse_flags_without_effect(draft: Draft) -> None:
    for entry in (*NO_EFFECT, *NO_EFFECT_BESIDE):
        if entry.works(draft):
            continue
        for name in entry.flags:
            spec, value = all_specs()[name], getattr(draft, name)
            if draft.was_given(name) and value != spec.default:
                shown = "set" if spec.kind is bool or spec.info.secret else f"{value}"
                raise ValueError(f"{spec.option} is {shown}, but {entry.reason}.")
