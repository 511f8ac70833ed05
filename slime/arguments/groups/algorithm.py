"""Flags and rules of the algorithm: the loss, the advantages, clipping, KL and entropy."""

from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import both, either, flag, having, lacks, needs, stays_on
from slime.arguments.groups.objectives import NOT_PAIRS, PAIR_LOSSES, POLICY_LOSS, SUPERVISED_LOSSES
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.catalog.estimators import ESTIMATORS, WITH_CRITIC
from slime.catalog.loss_types import LOSS_TYPES
from slime.catalog.policy_losses import POLICY_LOSS_ARGS, POLICY_LOSSES, REDUCTIONS

# Largest mean difference per token of engine's and trainer's log-probs; above it a run stops.
LOGPROB_DIFF_THRESHOLDS = {"float32": 0.02, "bfloat16": 0.2, "fp8": 0.2}
# Rollout functions whose groups have --n-samples-per-prompt responses; others may form any groups.
GROUPING_ROLLOUTS = (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION)


def _own_policy_loss(draft: Draft) -> bool:
    return draft.custom_policy_loss_function_path is not None


def _own_advantages(draft: Draft) -> bool:
    return draft.custom_advantage_function_path is not None


# -- when flags have an effect
KL_LOSS = needs("use_kl_loss", harmless=True)
KL = either(needs("use_kl_loss"), needs("kl_coef"), harmless=True)
POLICY_TERMS = lacks("loss_type", *SUPERVISED_LOSSES)
OLD_POLICY = either(needs("loss_type", "policy_loss"), stays_on("compute_advantages_and_returns"))
OWN_SAMPLES = lacks("loss_type", *SUPERVISED_LOSSES)
BUILT_IN_LOSS = lacks("custom_policy_loss_function_path")
CLIPS = needs("policy_loss_type", *having(POLICY_LOSSES, "clips"), or_if=_own_policy_loss)
DUAL_CLIPS = needs("policy_loss_type", *having(POLICY_LOSSES, "dual_clips"), or_if=_own_policy_loss)
SCALES_REWARDS = both(
    needs("advantage_estimator", *having(ESTIMATORS, "scale_rewards")), stays_on("rewards_normalization")
)
COMPARES_REWARDS = needs("advantage_estimator", *having(ESTIMATORS, "baseline"))
BUILT_IN_COMPARISON = lacks("custom_reward_post_process_path")
ADVANTAGES = lacks("loss_type", *SUPERVISED_LOSSES)
DISCOUNTS = needs(
    "advantage_estimator", *having(ESTIMATORS, "uses_gamma"), or_if=_own_advantages, harmless=True
)
GAE = needs("advantage_estimator", WITH_CRITIC, or_if=_own_advantages, said_by="advantage_estimator")
CUSTOM_LOSS = needs("loss_type", "custom_loss")
COMPUTES_ADVANTAGES = stays_on("compute_advantages_and_returns")


@dataclass
class AlgorithmFlags:
    """Algorithm."""

    loss_type: str = flag("policy_loss", "what is minimised", choices=tuple(LOSS_TYPES))
    custom_loss_function_path: str | None = flag(
        None, "loss of --loss-type custom_loss", only_with=CUSTOM_LOSS
    )
    advantage_estimator: str = flag(
        "grpo",
        "how rewards become advantages",
        choices=tuple(ESTIMATORS),
        only_with=(ADVANTAGES, COMPUTES_ADVANTAGES),
    )
    custom_advantage_function_path: str | None = flag(
        None, "function that computes advantages", only_with=(ADVANTAGES, COMPUTES_ADVANTAGES)
    )
    policy_loss_type: str | None = flag(
        None,
        "how advantages become a loss; default: the estimator's own, else ppo",
        choices=tuple(POLICY_LOSSES),
        only_with=(POLICY_LOSS, BUILT_IN_LOSS),
    )
    custom_policy_loss_function_path: str | None = flag(
        None, "function in place of --policy-loss-type", only_with=POLICY_LOSS
    )
    policy_loss_args: dict = flag(
        {},
        "numbers of the --policy-loss-type:",
        metavar="NAME=NUMBER,...",
        rows=POLICY_LOSS_ARGS,
        only_with=POLICY_LOSS,
    )
    loss_reduction: str | None = flag(
        None,
        "divisor of a token's loss; default: rollout_mean, constant with dr_grpo",
        choices=tuple(REDUCTIONS),
        only_with=NOT_PAIRS,
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, "function that builds the reducer of the policy-gradient term", only_with=POLICY_LOSS
    )
    compute_advantages_and_returns: bool = flag(
        True, "compute no advantages (SFT, custom losses)", off="--disable-compute-advantages-and-returns"
    )
    normalize_advantages: bool = flag(
        False, "whiten advantages over the whole rollout", only_with=(ADVANTAGES, COMPUTES_ADVANTAGES)
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
        1.0, "lambda of generalised advantages", ge=0, le=1, only_with=(ADVANTAGES, GAE, COMPUTES_ADVANTAGES)
    )
    eps_clip: float = flag(0.2, "clip of the policy ratio, below", ge=0, only_with=(POLICY_TERMS, CLIPS))
    eps_clip_high: float | None = flag(
        None, "clip of the policy ratio, above; default: --eps-clip", ge=0, only_with=(POLICY_TERMS, CLIPS)
    )
    eps_clip_c: float | None = flag(
        None, "dual clip (negative advantages)", gt=1, only_with=(POLICY_TERMS, DUAL_CLIPS)
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", only_with=POLICY_TERMS)
    kl_coef: float = flag(
        0.0, "KL to the reference, in the reward", only_with=(ADVANTAGES, COMPUTES_ADVANTAGES)
    )
    use_kl_loss: bool = flag(False, "KL to the reference as a term of the loss", only_with=POLICY_TERMS)
    kl_loss_coef: float = flag(0.0, "weight of the KL term of the loss", only_with=KL_LOSS)
    kl_loss_type: str = flag(
        "k1",
        "KL estimator; k1 only with --kl-coef or --use-unbiased-kl",
        choices=("k1", "k2", "k3", "low_var_kl"),
        only_with=KL,
    )
    use_unbiased_kl: bool = flag(False, "weight the KL estimate by the policy ratio", only_with=KL_LOSS)
    use_rollout_logprobs: bool = flag(
        False, "use the engine's log-probs as those of the old policy", only_with=(POLICY_TERMS, OLD_POLICY)
    )
    use_rollout_entropy: bool = flag(False, "measure entropy in the log-prob pass", only_with=POLICY_LOSS)
    skip_on_policy_check: bool = flag(
        False, "do not check that the first step of a rollout starts at ratio 1", only_with=POLICY_LOSS
    )
    logprob_diff_threshold: float | None = flag(
        None,
        "mean log-prob difference of engine and trainer that stops the run; 0: never. Default: 0.02 "
        "in float32, else 0.2",
        ge=0,
        only_with=OWN_SAMPLES,
    )
    nonfinite_action: str = flag(
        "stop", "after a NaN or infinite loss, whose step is never applied", choices=("stop", "skip")
    )


def loss(draft: Draft) -> None:
    if draft.loss_type == "custom_loss" and draft.custom_loss_function_path is None:
        raise ValueError("--loss-type custom_loss needs --custom-loss-function-path.")
    own_advantages = draft.rollout_data_postprocess_path or draft.custom_convert_samples_to_train_data_path
    has_advantages = draft.compute_advantages_and_returns or own_advantages
    if draft.loss_type == "policy_loss" and not has_advantages:
        raise ValueError(
            "--disable-compute-advantages-and-returns leaves --loss-type policy_loss without advantages; "
            "remove it, or set them in --rollout-data-postprocess-path."
        )
    if draft.loss_type in ("sft_loss", *PAIR_LOSSES) and draft.n_samples_per_prompt != 1:
        row = "one pair" if draft.loss_type in PAIR_LOSSES else "one response, and copies of it add nothing"
        raise ValueError(
            f"--n-samples-per-prompt is {draft.n_samples_per_prompt} with --loss-type {draft.loss_type}: "
            f"a row is {row}; use 1."
        )
    if draft.advantage_estimator.startswith("reinforce_plus_plus") and not draft.normalize_advantages:
        raise ValueError(f"--advantage-estimator {draft.advantage_estimator} needs --normalize-advantages.")


def policy_loss(draft: Draft) -> None:
    estimator = draft.advantage_estimator
    if draft.policy_loss_type is None:
        draft.derive("policy_loss_type", ESTIMATORS[estimator].policy_loss, f"the loss of {estimator}")
    if draft.eps_clip_high is None:
        draft.derive("eps_clip_high", draft.eps_clip, "same as eps_clip")
    for name in draft.policy_loss_args:
        known = POLICY_LOSSES[draft.policy_loss_type].args
        if name not in known and draft.custom_policy_loss_function_path is None:
            types = " or ".join(loss for loss, row in POLICY_LOSSES.items() if name in row.args)
            raise ValueError(f"--policy-loss-args {name}: only --policy-loss-type {types} has it; remove it.")


def loss_reduction(draft: Draft) -> None:
    """Resolve the two spellings: --calculate-per-token-loss is --loss-reduction token_mean."""
    if draft.calculate_per_token_loss:
        if draft.loss_reduction not in (None, "token_mean"):
            raise ValueError(
                f"--loss-reduction is {draft.loss_reduction}, but --calculate-per-token-loss asks for "
                "token_mean; keep one."
            )
        draft.derive("loss_reduction", "token_mean", "calculate_per_token_loss")
    if draft.loss_reduction is None:
        estimator = draft.advantage_estimator
        default = ESTIMATORS[estimator].reduction if draft.loss_type == "policy_loss" else None
        because = f"the reduction of {estimator}" if default else "the default"
        draft.derive("loss_reduction", default or "rollout_mean", because)
    if draft.loss_reduction == "token_mean":
        draft.derive("calculate_per_token_loss", True, "loss_reduction token_mean")
    _sequence_ratios(draft)
    if draft.loss_reduction == "constant" and draft.rollout_max_response_len is None:
        raise ValueError("--loss-reduction constant divides by --rollout-max-response-len: give it.")


def _sequence_ratios(draft: Draft) -> None:
    """Refuse sums over tokens if there is one ratio per sample: long samples would count more."""
    replaced = draft.custom_policy_loss_function_path or draft.custom_pg_loss_reducer_function_path
    built_in = draft.loss_type == "policy_loss" and not replaced
    per_sample = POLICY_LOSSES[draft.policy_loss_type].ratio_per_sample
    if built_in and per_sample and REDUCTIONS[draft.loss_reduction].by_length:
        spelling = " (--calculate-per-token-loss)" if draft.was_given("calculate_per_token_loss") else ""
        raise ValueError(
            f"--loss-reduction is {draft.loss_reduction}{spelling} with --policy-loss-type "
            f"{draft.policy_loss_type}, which has one ratio per sample: each sample would count as often as "
            "it has tokens; use rollout_mean or sample_mean, or --policy-loss-type ppo."
        )


def group_normalisation(draft: Draft) -> None:
    """Refuse groups of one response: without a comparison every advantage would be 0."""
    if draft.n_samples_per_prompt > 1:
        return
    estimator = draft.advantage_estimator
    if _compares_in_groups(draft):
        divides = ESTIMATORS[estimator].scale_rewards and draft.grpo_std_normalization
        lacks = "no standard deviation to divide by" if divides else "nothing to be compared with"
        raise ValueError(
            f"--n-samples-per-prompt is 1 with --advantage-estimator {estimator}: a group of one answer has "
            f"{lacks}, so every advantage would be 0; use at least 2, or an estimator without groups (ppo)."
        )
    draft.derive("grpo_std_normalization", False, "a group of one sample has no standard deviation")


def _compares_in_groups(draft: Draft) -> bool:
    """Return whether advantages compare rewards within groups of --n-samples-per-prompt responses."""
    replaced = draft.custom_reward_post_process_path or draft.custom_advantage_function_path
    own_groups = draft.rollout_function_path not in GROUPING_ROLLOUTS or draft.load_debug_rollout_data
    unscored = draft.loss_type in SUPERVISED_LOSSES or draft.use_opd or draft.debug_rollout_only
    if not draft.compute_advantages_and_returns or replaced or own_groups or unscored:
        return False
    return draft.rewards_normalization and ESTIMATORS[draft.advantage_estimator].compares_in_groups


def reference_model(draft: Draft) -> None:
    coefficient, estimator = draft.kl_coef, draft.advantage_estimator
    if coefficient != 0 and draft.use_kl_loss and draft.kl_loss_coef != 0:
        raise ValueError(
            f"--kl-coef is {coefficient:g} and --kl-loss-coef is {draft.kl_loss_coef:g}: the KL would "
            "count twice, in the reward and in the loss; keep one of them."
        )
    # A user's estimator may read rollout_data["kl"].
    reads_kl = ESTIMATORS[estimator].uses_kl_in_reward or draft.custom_advantage_function_path is not None
    if coefficient != 0 and not reads_kl:
        raise ValueError(
            f"--kl-coef is {coefficient:g}, but {estimator} never subtracts a KL from the reward; use "
            f"--use-kl-loss --kl-loss-coef {coefficient:g}."
        )
    _kl_loss(draft)
    if (coefficient != 0 or draft.use_kl_loss) and draft.ref_load is None:
        draft.derive("ref_load", draft.hf_checkpoint, "the KL needs a reference; taken from hf_checkpoint")


def _kl_loss(draft: Draft) -> None:
    """Check the KL term: as a loss, the gradient of k1 (log-prob minus reference) ignores the reference."""
    if not draft.use_kl_loss or draft.loss_type != "policy_loss":
        return
    if draft.kl_loss_coef == 0:
        draft.warn(
            "--use-kl-loss with --kl-loss-coef 0: the KL is reported (train/kl_loss), and pulls on nothing; "
            "leave --use-kl-loss out to save the reference and its pass."
        )
    elif draft.kl_loss_type == "k1" and not draft.use_unbiased_kl:
        default = "" if draft.was_given("kl_loss_type") else " (the default)"
        raise ValueError(
            f"--use-kl-loss with --kl-loss-type k1{default}: the gradient of k1 does not depend on the "
            "reference, so it holds the policy to nothing; use --kl-loss-type k3 (or low_var_kl, k2), or add "
            "--use-unbiased-kl."
        )
