"""Flags of the algorithm: the loss, the advantages, clipping, KL and entropy."""

from dataclasses import dataclass

from slime.arguments.flag import flag

# The one place that says which estimators can be chosen; the others are known names that are refused as not built.
ADVANTAGE_ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
UNBUILT_ESTIMATORS = ("ppo",)
# Estimators whose advantages never contain --kl-coef.
ESTIMATORS_WITHOUT_KL = ("grpo", "gspo", "cispo")


@dataclass(frozen=True)
class AlgorithmFlags:
    """Algorithm."""

    loss_type: str = flag("policy_loss", "what is minimised", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = flag(None, "the loss of --loss-type custom_loss", metavar="PATH")
    advantage_estimator: str = flag(
        "grpo", "how rewards become advantages", choices=ADVANTAGE_ESTIMATORS, not_built=UNBUILT_ESTIMATORS
    )
    custom_advantage_function_path: str | None = flag(None, "function that computes advantages", metavar="PATH")
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, "function that builds the reducer of the policy-gradient term", metavar="PATH"
    )
    compute_advantages_and_returns: bool = flag(
        True, "no advantages (SFT, custom losses)", off="--disable-compute-advantages-and-returns"
    )
    normalize_advantages: bool = flag(False, "whiten advantages over the whole step")
    rewards_normalization: bool = flag(True, "do not centre rewards in a group", off="--disable-rewards-normalization")
    grpo_std_normalization: bool = flag(
        True, "do not divide by the group's standard deviation", off="--disable-grpo-std-normalization"
    )
    eps_clip: float = flag(0.2, "clip of the policy ratio, below", ge=0)
    eps_clip_high: float | None = flag(None, "clip of the policy ratio, above; default: --eps-clip", ge=0)
    eps_clip_c: float | None = flag(None, "dual clip for negative advantages", gt=1)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    kl_coef: float = flag(0.0, "KL to the reference as part of the reward (reinforce_plus_plus only)")
    use_kl_loss: bool = flag(False, "KL to the reference as a term of the loss")
    kl_loss_coef: float = flag(0.0, "weight of that term")
    kl_loss_type: str = flag("k1", "KL estimator", choices=("k1", "k2", "k3", "low_var_kl"))
    use_unbiased_kl: bool = flag(False, "weight the KL estimate by the policy ratio")
    use_rollout_logprobs: bool = flag(False, "take the engine's log-probs as those of the old policy")
    use_rollout_entropy: bool = flag(False, "measure entropy in the log-prob pass")
