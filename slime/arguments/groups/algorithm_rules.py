"""Rules of the algorithm flags: what an estimator implies, what excludes what, and what needs what."""

from slime.arguments.core.draft import Draft
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.policy_losses import POLICY_LOSSES, REDUCTIONS

# The entry of a dict reward that holds the sum of --reward-weights.
WEIGHTED_REWARD_KEY = "weighted_sum"
# Rollout functions whose groups have --n-samples-per-prompt answers; others may group as they like.
GROUPING_ROLLOUTS = (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION)


def policy_loss(draft: Draft) -> None:
    estimator = draft.advantage_estimator
    if draft.policy_loss_type is None:
        draft.derive("policy_loss_type", ESTIMATORS[estimator].policy_loss, f"the loss of {estimator}")
    if draft.eps_clip_high is None:
        draft.derive("eps_clip_high", draft.eps_clip, "same as eps_clip")
    if draft.clip_cov_low > draft.clip_cov_high:
        raise ValueError(
            f"--clip-cov-low is {draft.clip_cov_low:g}, above --clip-cov-high {draft.clip_cov_high:g}: no "
            "token lies between."
        )


def loss_reduction(draft: Draft) -> None:
    """One decision with two spellings: --calculate-per-token-loss is --loss-reduction token_mean."""
    if draft.calculate_per_token_loss:
        if draft.loss_reduction not in (None, "token_mean"):
            raise ValueError(
                f"--loss-reduction is {draft.loss_reduction}, but --calculate-per-token-loss asks for "
                "token_mean; keep one."
            )
        draft.derive("loss_reduction", "token_mean", "calculate_per_token_loss")
    if draft.loss_reduction is None:
        default = (
            ESTIMATORS[draft.advantage_estimator].reduction if draft.loss_type == "policy_loss" else None
        )
        because = f"the reduction of {draft.advantage_estimator}" if default else "the default"
        draft.derive("loss_reduction", default or "rollout_mean", because)
    if draft.loss_reduction == "token_mean":
        draft.derive("calculate_per_token_loss", True, "loss_reduction token_mean")
    _sequence_ratios(draft)
    if draft.loss_reduction == "constant" and draft.loss_denominator is None:
        if draft.rollout_max_response_len is None:
            raise ValueError(
                "--loss-reduction constant divides by --loss-denominator, or by --rollout-max-response-len; "
                "give one of them."
            )
        draft.derive(
            "loss_denominator", float(draft.rollout_max_response_len), "same as rollout_max_response_len"
        )


def _sequence_ratios(draft: Draft) -> None:
    """A loss with one ratio per sample is defined as a mean over samples; summed
    over tokens, long samples would count more.
    """
    replaced = draft.custom_policy_loss_function_path or draft.custom_pg_loss_reducer_function_path
    if (
        draft.loss_type != "policy_loss"
        or replaced
        or not POLICY_LOSSES[draft.policy_loss_type].ratio_per_sample
    ):
        return
    if REDUCTIONS[draft.loss_reduction].by_length:
        spelling = " (--calculate-per-token-loss)" if draft.was_given("calculate_per_token_loss") else ""
        raise ValueError(
            f"--loss-reduction is {draft.loss_reduction}{spelling} with --policy-loss-type "
            f"{draft.policy_loss_type}, which has one ratio per sample: each sample would count as often as "
            "it has tokens; use rollout_mean or sample_mean, or a loss with a ratio per token "
            "(--policy-loss-type ppo)."
        )


def group_normalisation(draft: Draft) -> None:
    """A group of one answer has nothing to be compared with: training on it would silently change nothing."""
    if draft.n_samples_per_prompt > 1:
        return
    estimator = draft.advantage_estimator
    if _compares_in_groups(draft):
        divides = ESTIMATORS[estimator].scale_rewards and draft.grpo_std_normalization
        lacks = "no standard deviation to divide by" if divides else "nothing to be compared with"
        raise ValueError(
            f"--n-samples-per-prompt is 1 with --advantage-estimator {estimator}: a group of one answer has "
            f"{lacks}, so every advantage would be 0; use at least 2, an estimator without groups "
            "(reinforce_plus_plus, ppo, remax), or raw rewards (--disable-rewards-normalization)."
        )
    if draft.grpo_std_normalization:
        draft.derive("grpo_std_normalization", False, "a group of one sample has no standard deviation")


def _compares_in_groups(draft: Draft) -> bool:
    """Whether rewards become advantages by comparison within groups of --n-samples-per-prompt answers."""
    by_reward = (
        draft.loss_type not in SUPERVISED_LOSSES
        and draft.compute_advantages_and_returns
        and not draft.use_opd
    )
    replaced = draft.custom_reward_post_process_path or draft.custom_advantage_function_path
    own_groups = draft.rollout_function_path not in GROUPING_ROLLOUTS or draft.load_debug_rollout_data
    if not by_reward or replaced or own_groups or draft.debug_rollout_only:
        return False
    return draft.rewards_normalization and ESTIMATORS[draft.advantage_estimator].compares_in_groups


def reference_model(draft: Draft) -> None:
    if draft.kl_coef != 0 and draft.kl_loss_coef != 0:
        raise ValueError(
            f"--kl-coef is {draft.kl_coef:g} and --kl-loss-coef is {draft.kl_loss_coef:g}: the KL would "
            "count twice, in the reward and in the loss; keep one of them."
        )
    own_estimator = draft.custom_advantage_function_path is not None  # it may read rollout_data["kl"]
    if (
        draft.kl_coef != 0
        and not ESTIMATORS[draft.advantage_estimator].uses_kl_in_reward
        and not own_estimator
    ):
        raise ValueError(
            f"--kl-coef is {draft.kl_coef:g}, but {draft.advantage_estimator} never subtracts a KL from the "
            f"reward; use --use-kl-loss --kl-loss-coef {draft.kl_coef:g}."
        )
    _kl_loss(draft)
    if (draft.kl_coef != 0 or draft.use_kl_loss) and draft.ref_load is None:
        draft.derive("ref_load", draft.hf_checkpoint, "the KL needs a reference; taken from hf_checkpoint")


def _kl_loss(draft: Draft) -> None:
    """As a term of the loss k1 is log-prob minus reference, whose gradient the reference drops out of."""
    if not draft.use_kl_loss or draft.loss_type != "policy_loss":
        return
    if draft.kl_loss_coef == 0:
        draft.warn(
            "--use-kl-loss with --kl-loss-coef 0: the KL to the reference is computed and reported "
            "(train/kl_loss), and pulls on "
            "nothing; give a coefficient, or leave --use-kl-loss out to save the reference and its pass."
        )
    elif draft.kl_loss_type == "k1" and not draft.use_unbiased_kl:
        raise ValueError(
            f"--use-kl-loss --kl-loss-coef {draft.kl_loss_coef:g} with --kl-loss-type k1"
            f"{'' if draft.was_given('kl_loss_type') else ' (the default)'}: the gradient of k1 does not "
            "depend on the reference, so "
            "the term would make every sampled token less likely and hold the policy to nothing; use "
            "--kl-loss-type k3 (or "
            "low_var_kl, k2), or add --use-unbiased-kl."
        )


def off_policy(draft: Draft) -> None:
    if draft.use_tis and draft.use_rollout_logprobs:
        raise ValueError(
            "--use-tis corrects from the engine's policy to the trainer's, but --use-rollout-logprobs makes "
            "the engine's the one that ratios are taken against; keep one of them."
        )
    if draft.tis_clip_low > draft.tis_clip:
        raise ValueError(f"--tis-clip-low is {draft.tis_clip_low:g}, above --tis-clip {draft.tis_clip:g}.")
    if draft.rs_lower is None:
        draft.derive("rs_lower", 1.0 / draft.rs_upper, "1 / rs_upper")
    if draft.rs_lower > draft.rs_upper:
        raise ValueError(
            f"--rs-lower is {draft.rs_lower:g}, above --rs-upper {draft.rs_upper:g}: nothing would be kept."
        )


def reward_shaping(draft: Draft) -> None:
    if draft.reward_weights is not None:
        _check_weights(draft)
        draft.derive("reward_key", WEIGHTED_REWARD_KEY, "the sum of reward_weights")
    if draft.overlong_buffer_len is None:
        return
    longest = draft.rollout_max_response_len
    if longest is None or draft.overlong_buffer_len > longest:
        raise ValueError(
            f"--overlong-buffer-len is {draft.overlong_buffer_len}, but --rollout-max-response-len is "
            f"{longest}: the buffer is the last part of the longest response; use less."
        )
    if draft.advantage_estimator == "maxrl" and draft.overlong_penalty_factor != 0:
        raise ValueError(
            "--overlong-buffer-len makes rewards of long answers negative, and --advantage-estimator maxrl "
            "divides by the mean reward, which must be at least 0; remove it, or choose another estimator."
        )


def _check_weights(draft: Draft) -> None:
    if draft.reward_key is not None:
        raise ValueError(
            f"--reward-key is {draft.reward_key} and --reward-weights is set: one entry or a sum of entries "
            "counts; keep one."
        )
    bad = [
        name
        for name, weight in draft.reward_weights.items()
        if isinstance(weight, bool) or not _is_number(weight)
    ]
    if bad or not draft.reward_weights:
        raise ValueError(
            f"--reward-weights is {draft.reward_weights}: expected a number for each entry of the reward."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and value == value and abs(value) != float("inf")
