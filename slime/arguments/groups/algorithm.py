"""Flags and rules of the algorithm: the loss, the advantages, clipping, KL and entropy."""

from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import OnlyWith, flag, needs
from slime.arguments.groups.objectives import NOT_PAIRS, POLICY_LOSS, SUPERVISED_LOSSES
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.catalog.estimators import ESTIMATORS, WITH_CRITIC
from slime.catalog.policy_losses import POLICY_LOSSES, REDUCTIONS

LOSS_TYPES = ("policy_loss", "sft_loss", "dpo_loss", "rm_loss", "custom_loss")
# How far the log-probs of engine and trainer may lie apart, as a mean over tokens, before a run stops.
LOGPROB_DIFF_THRESHOLDS = {"float32": 0.02, "bfloat16": 0.2, "fp8": 0.2}
# Rollout functions whose groups have --n-samples-per-prompt answers; others may group as they like.
GROUPING_ROLLOUTS = (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION)


# -- when flags have an effect
KL_LOSS = needs("use_kl_loss", "the loss has no KL term without --use-kl-loss; add it", harmless=True)
KL = OnlyWith(
    "with --use-kl-loss or --kl-coef",
    lambda d: d.use_kl_loss or d.kl_coef != 0,
    "no KL is computed without --use-kl-loss; add it",
    harmless=True,
)
POLICY_TERMS = OnlyWith(
    "with a --loss-type that has policy ratios",
    lambda d: d.loss_type not in SUPERVISED_LOSSES,
    "this --loss-type has no policy ratios, no entropy and no KL term; remove it or use policy_loss",
)
OLD_POLICY = OnlyWith(
    "with advantages",
    lambda d: d.loss_type == "policy_loss" or d.compute_advantages_and_returns,
    "no old policy is asked for without advantages; remove it",
)
OWN_SAMPLES = OnlyWith(
    "with samples of the policy's own",
    lambda d: d.loss_type not in SUPERVISED_LOSSES,
    "the samples of this --loss-type are not the policy's own; remove it",
)
BUILT_IN_LOSS = OnlyWith(
    "without --custom-policy-loss-function-path",
    lambda d: d.custom_policy_loss_function_path is None,
    "--custom-policy-loss-function-path replaces it; remove one of them",
)
CLIPS = OnlyWith(
    "with a --policy-loss-type that clips",
    lambda d: POLICY_LOSSES[d.policy_loss_type].clips or d.custom_policy_loss_function_path is not None,
    "this --policy-loss-type clips no ratio; remove it",
)
DUAL_CLIPS = OnlyWith(
    "with a --policy-loss-type that has a dual clip",
    lambda d: POLICY_LOSSES[d.policy_loss_type].dual_clips or d.custom_policy_loss_function_path is not None,
    "this --policy-loss-type has no dual clip; remove it",
)
SCALES_REWARDS = OnlyWith(
    "with an --advantage-estimator that divides by a group's standard deviation",
    lambda d: ESTIMATORS[d.advantage_estimator].scale_rewards and d.rewards_normalization,
    "no reward is divided by a group's standard deviation here (only grpo, gspo and cispo do); remove it",
)
COMPARES_REWARDS = OnlyWith(
    "with an --advantage-estimator that compares rewards",
    lambda d: ESTIMATORS[d.advantage_estimator].baseline is not None,
    "this --advantage-estimator compares no rewards; remove it",
)
BUILT_IN_COMPARISON = OnlyWith(
    "without --custom-reward-post-process-path",
    lambda d: d.custom_reward_post_process_path is None,
    "--custom-reward-post-process-path replaces the comparison of rewards; remove one of them",
)
ADVANTAGES = OnlyWith(
    "with a --loss-type that has advantages",
    lambda d: d.loss_type not in SUPERVISED_LOSSES,
    "this --loss-type has no advantages; remove it",
)
DISCOUNTS = OnlyWith(
    "with an --advantage-estimator that discounts",
    lambda d: ESTIMATORS[d.advantage_estimator].uses_gamma or d.custom_advantage_function_path is not None,
    "this --advantage-estimator discounts nothing; remove it",
    harmless=True,
)
GAE = OnlyWith(
    f"with --advantage-estimator {WITH_CRITIC}",
    lambda d: ESTIMATORS[d.advantage_estimator].needs_values or d.custom_advantage_function_path is not None,
    f"only --advantage-estimator {WITH_CRITIC} has it; remove it",
    said_by="advantage_estimator",
)
CONSTANT = OnlyWith(
    "with --loss-reduction constant",
    lambda d: d.loss_reduction == "constant",
    "no constant divides the loss; add --loss-reduction constant",
)
CUSTOM_LOSS = OnlyWith(
    "with --loss-type custom_loss",
    lambda d: d.loss_type == "custom_loss",
    "only --loss-type custom_loss calls it; add that",
)
SFT = OnlyWith(
    "with --loss-type sft_loss",
    lambda d: d.loss_type == "sft_loss",
    "a policy loss measures it anyway, and others have none; remove it",
)
COMPUTES_ADVANTAGES = OnlyWith(
    "without --disable-compute-advantages-and-returns",
    lambda d: d.compute_advantages_and_returns,
    "--disable-compute-advantages-and-returns leaves advantages out; remove one of them",
)


def _read_by(flag_name: str) -> OnlyWith:
    """Flags of some policy losses alone: the rows of these losses name them."""
    types = [name for name, row in POLICY_LOSSES.items() if flag_name in row.flags]
    words = f"--policy-loss-type {' or '.join(types)}"
    return OnlyWith(
        f"with {words}",
        lambda d: d.policy_loss_type in types or d.custom_policy_loss_function_path is not None,
        f"only {words} reads it; use that",
    )


@dataclass
class AlgorithmFlags:
    """Algorithm."""

    loss_type: str = flag("policy_loss", "what is minimised", choices=LOSS_TYPES)
    custom_loss_function_path: str | None = flag(
        None, "the loss of --loss-type custom_loss", metavar="PATH", only_with=CUSTOM_LOSS
    )
    advantage_estimator: str = flag(
        "grpo",
        "how rewards become advantages",
        choices=tuple(ESTIMATORS),
        only_with=(ADVANTAGES, COMPUTES_ADVANTAGES),
    )
    custom_advantage_function_path: str | None = flag(
        None, "function that computes advantages", metavar="PATH", only_with=(ADVANTAGES, COMPUTES_ADVANTAGES)
    )
    policy_loss_type: str | None = flag(
        None,
        "how advantages become a loss; default: the estimator's own, else ppo",
        choices=tuple(POLICY_LOSSES),
        only_with=(POLICY_LOSS, BUILT_IN_LOSS),
    )
    custom_policy_loss_function_path: str | None = flag(
        None, "function in place of --policy-loss-type", metavar="PATH", only_with=POLICY_LOSS
    )
    loss_reduction: str | None = flag(
        None,
        "what a token's loss is divided by; default: rollout_mean, constant with dr_grpo",
        choices=tuple(REDUCTIONS),
        only_with=NOT_PAIRS,
    )
    loss_denominator: float | None = flag(
        None,
        "the constant of --loss-reduction constant; default: --rollout-max-response-len",
        gt=0,
        only_with=CONSTANT,
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        "function that builds the reducer of the policy-gradient term",
        metavar="PATH",
        only_with=POLICY_LOSS,
    )
    compute_advantages_and_returns: bool = flag(
        True, "no advantages (SFT, custom losses)", off="--disable-compute-advantages-and-returns"
    )
    normalize_advantages: bool = flag(
        False,
        "whiten advantages over the trained tokens of the whole rollout",
        only_with=(ADVANTAGES, COMPUTES_ADVANTAGES),
    )
    rewards_normalization: bool = flag(
        True,
        "do not centre rewards in a group",
        off="--disable-rewards-normalization",
        only_with=(COMPARES_REWARDS, BUILT_IN_COMPARISON, ADVANTAGES, COMPUTES_ADVANTAGES),
    )
    grpo_std_normalization: bool = flag(
        True,
        "do not divide by the group's standard deviation",
        off="--disable-grpo-std-normalization",
        only_with=(SCALES_REWARDS, BUILT_IN_COMPARISON, ADVANTAGES, COMPUTES_ADVANTAGES),
    )
    gamma: float = flag(
        1.0, "discount of token rewards", ge=0, le=1, only_with=(ADVANTAGES, DISCOUNTS, COMPUTES_ADVANTAGES)
    )
    lambd: float = flag(
        1.0,
        "lambda of generalised advantage estimation",
        ge=0,
        le=1,
        only_with=(ADVANTAGES, GAE, COMPUTES_ADVANTAGES),
    )
    eps_clip: float = flag(0.2, "clip of the policy ratio, below", ge=0, only_with=(POLICY_TERMS, CLIPS))
    eps_clip_high: float | None = flag(
        None, "clip of the policy ratio, above; default: --eps-clip", ge=0, only_with=(POLICY_TERMS, CLIPS)
    )
    eps_clip_c: float | None = flag(
        None, "dual clip for negative advantages", gt=1, only_with=(POLICY_TERMS, DUAL_CLIPS)
    )
    sapo_tau_pos: float = flag(
        1.0, "sapo: steepness of the gate for positive advantages", gt=0, only_with=_read_by("sapo_tau_pos")
    )
    sapo_tau_neg: float = flag(
        1.05, "sapo: the same for the others", gt=0, only_with=_read_by("sapo_tau_neg")
    )
    clip_cov_ratio: float = flag(
        2e-4,
        "clip_cov: share of tokens that lose their gradient",
        ge=0,
        le=1,
        only_with=_read_by("clip_cov_ratio"),
    )
    clip_cov_low: float = flag(
        1.0, "clip_cov: smallest covariance of such a token", only_with=_read_by("clip_cov_low")
    )
    clip_cov_high: float = flag(
        5.0, "clip_cov: largest covariance of such a token", only_with=_read_by("clip_cov_high")
    )
    kl_cov_ratio: float = flag(
        2e-3, "kl_cov: share of tokens that pay for moving", ge=0, le=1, only_with=_read_by("kl_cov_ratio")
    )
    kl_cov_coef: float = flag(
        1.0, "kl_cov: what they pay per unit of log-ratio", ge=0, only_with=_read_by("kl_cov_coef")
    )
    dppo_delta: float = flag(
        0.15, "dppo: how far a token's probability may move", gt=0, only_with=_read_by("dppo_delta")
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", only_with=POLICY_TERMS)
    kl_coef: float = flag(
        0.0,
        "KL to the reference as part of the reward (reinforce_plus_plus, ppo)",
        only_with=(ADVANTAGES, COMPUTES_ADVANTAGES),
    )
    use_kl_loss: bool = flag(False, "KL to the reference as a term of the loss", only_with=POLICY_TERMS)
    kl_loss_coef: float = flag(0.0, "weight of that term", only_with=KL_LOSS)
    kl_loss_type: str = flag(
        "k1",
        "KL estimator; k1 is for --kl-coef, or as a loss with --use-unbiased-kl",
        choices=("k1", "k2", "k3", "low_var_kl"),
        only_with=KL,
    )
    use_unbiased_kl: bool = flag(False, "weight the KL estimate by the policy ratio", only_with=KL_LOSS)
    use_rollout_logprobs: bool = flag(
        False, "take the engine's log-probs as those of the old policy", only_with=(POLICY_TERMS, OLD_POLICY)
    )
    use_rollout_entropy: bool = flag(False, "measure entropy in the log-prob pass", only_with=POLICY_LOSS)
    log_sft_entropy: bool = flag(
        False, "measure the entropy of the model on the trained tokens in SFT, too", only_with=SFT
    )
    skip_on_policy_check: bool = flag(
        False, "do not check that the first step of a rollout starts at ratio 1", only_with=POLICY_LOSS
    )
    logprob_diff_threshold: float | None = flag(
        None,
        "mean difference between the log-probs of engine and trainer that stops the run; 0: never; default: "
        "0.02 where both compute in float32, else 0.2; a difference that grows with the pushes is told "
        "before that",
        ge=0,
        only_with=OWN_SAMPLES,
    )
    nonfinite_action: str = flag(
        "stop",
        "what a step with a NaN or infinite loss does to the run; it is never applied",
        choices=("stop", "skip"),
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "the same as --nonfinite-action skip", off="--no-check-for-nan-in-loss-and-grad"
    )


def loss(draft: Draft) -> None:
    if not draft.check_for_nan_in_loss_and_grad and not draft.was_given("nonfinite_action"):
        draft.derive("nonfinite_action", "skip", "no_check_for_nan_in_loss_and_grad")
    if draft.loss_type == "custom_loss" and draft.custom_loss_function_path is None:
        raise ValueError("--loss-type custom_loss needs --custom-loss-function-path.")
    brings_advantages = draft.rollout_data_postprocess_path or draft.custom_convert_samples_to_train_data_path
    if (
        draft.loss_type == "policy_loss"
        and not draft.compute_advantages_and_returns
        and not brings_advantages
    ):
        raise ValueError(
            "--disable-compute-advantages-and-returns leaves --loss-type policy_loss without advantages; "
            "remove it, or set them in --rollout-data-postprocess-path."
        )
    if draft.loss_type == "sft_loss" and draft.n_samples_per_prompt != 1:
        raise ValueError(
            f"--n-samples-per-prompt is {draft.n_samples_per_prompt} with --loss-type sft_loss: SFT trains "
            "on the given answer, and copies of it add nothing; use 1."
        )
    if draft.advantage_estimator.startswith("reinforce_plus_plus") and not draft.normalize_advantages:
        raise ValueError(f"--advantage-estimator {draft.advantage_estimator} needs --normalize-advantages.")


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
    """One ratio per sample means a mean over samples: in a sum over tokens, long ones would count more."""
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
    if draft.kl_coef != 0 and draft.use_kl_loss and draft.kl_loss_coef != 0:
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
            "(train/kl_loss), and pulls on nothing; give a coefficient, or leave --use-kl-loss out to save "
            "the reference and its pass."
        )
    elif draft.kl_loss_type == "k1" and not draft.use_unbiased_kl:
        raise ValueError(
            f"--use-kl-loss --kl-loss-coef {draft.kl_loss_coef:g} with --kl-loss-type "
            f"k1{'' if draft.was_given('kl_loss_type') else ' (the default)'}: the gradient of k1 does not "
            "depend on the reference, so the term would make every sampled token less likely and hold the "
            "policy to nothing; use --kl-loss-type k3 (or low_var_kl, k2), or add --use-unbiased-kl."
        )
