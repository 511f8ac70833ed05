"""Flags of the algorithm: the loss, the advantages, clipping, KL and entropy."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.policy_losses import POLICY_LOSSES, REDUCTIONS

LOSS_TYPES = ("policy_loss", "sft_loss", "dpo_loss", "rm_loss", "custom_loss")
# How far the log-probs of engine and trainer may lie apart, as a mean over tokens, before a run stops.
LOGPROB_DIFF_THRESHOLDS = {"float32": 0.02, "bfloat16": 0.2, "fp8": 0.2}


@dataclass
class AlgorithmFlags:
    """Algorithm."""

    loss_type: str = flag("policy_loss", "what is minimised", choices=LOSS_TYPES)
    custom_loss_function_path: str | None = flag(None, "the loss of --loss-type custom_loss", metavar="PATH")
    advantage_estimator: str = flag("grpo", "how rewards become advantages", choices=tuple(ESTIMATORS))
    custom_advantage_function_path: str | None = flag(
        None, "function that computes advantages", metavar="PATH"
    )
    policy_loss_type: str | None = flag(
        None,
        "how advantages become a loss; default: the estimator's own, else ppo",
        choices=tuple(POLICY_LOSSES),
    )
    custom_policy_loss_function_path: str | None = flag(
        None, "function in place of --policy-loss-type", metavar="PATH"
    )
    loss_reduction: str | None = flag(
        None,
        "what a token's loss is divided by; default: rollout_mean, constant with dr_grpo",
        choices=tuple(REDUCTIONS),
    )
    loss_denominator: float | None = flag(
        None, "the constant of --loss-reduction constant; default: --rollout-max-response-len", gt=0
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, "function that builds the reducer of the policy-gradient term", metavar="PATH"
    )
    compute_advantages_and_returns: bool = flag(
        True, "no advantages (SFT, custom losses)", off="--disable-compute-advantages-and-returns"
    )
    normalize_advantages: bool = flag(False, "whiten advantages over the trained tokens of the whole rollout")
    rewards_normalization: bool = flag(
        True, "do not centre rewards in a group", off="--disable-rewards-normalization"
    )
    grpo_std_normalization: bool = flag(
        True, "do not divide by the group's standard deviation", off="--disable-grpo-std-normalization"
    )
    gamma: float = flag(1.0, "discount of token rewards", ge=0, le=1)
    lambd: float = flag(1.0, "lambda of generalised advantage estimation", ge=0, le=1)
    eps_clip: float = flag(0.2, "clip of the policy ratio, below", ge=0)
    eps_clip_high: float | None = flag(None, "clip of the policy ratio, above; default: --eps-clip", ge=0)
    eps_clip_c: float | None = flag(None, "dual clip for negative advantages", gt=1)
    sapo_tau_pos: float = flag(1.0, "sapo: steepness of the gate for positive advantages", gt=0)
    sapo_tau_neg: float = flag(1.05, "sapo: the same for the others", gt=0)
    clip_cov_ratio: float = flag(2e-4, "clip_cov: share of tokens that lose their gradient", ge=0, le=1)
    clip_cov_low: float = flag(1.0, "clip_cov: smallest covariance of such a token")
    clip_cov_high: float = flag(5.0, "clip_cov: largest covariance of such a token")
    kl_cov_ratio: float = flag(2e-3, "kl_cov: share of tokens that pay for moving", ge=0, le=1)
    kl_cov_coef: float = flag(1.0, "kl_cov: what they pay per unit of log-ratio", ge=0)
    dppo_delta: float = flag(0.15, "dppo: how far a token's probability may move", gt=0)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    kl_coef: float = flag(0.0, "KL to the reference as part of the reward (reinforce_plus_plus, ppo)")
    use_kl_loss: bool = flag(False, "KL to the reference as a term of the loss")
    kl_loss_coef: float = flag(0.0, "weight of that term")
    kl_loss_type: str = flag(
        "k1",
        "KL estimator; k1 is for --kl-coef, or as a loss with --use-unbiased-kl",
        choices=("k1", "k2", "k3", "low_var_kl"),
    )
    use_unbiased_kl: bool = flag(False, "weight the KL estimate by the policy ratio")
    use_rollout_logprobs: bool = flag(False, "take the engine's log-probs as those of the old policy")
    use_rollout_entropy: bool = flag(False, "measure entropy in the log-prob pass")
    skip_on_policy_check: bool = flag(
        False, "do not check that the first step of a rollout starts at ratio 1"
    )
    logprob_diff_threshold: float | None = flag(
        None,
        "mean difference between the log-probs of engine and trainer that stops the run; 0: never; default: "
        "0.02 "
        "where both compute in float32, else 0.2; a difference that grows with the pushes is told before that",
        ge=0,
    )
    nonfinite_action: str = flag(
        "stop",
        "what a step with a NaN or infinite loss does to the run; it is never applied",
        choices=("stop", "skip"),
    )
