"""Policy losses and reductions: the rows of `--policy-loss-type` and `--loss-reduction`."""

from dataclasses import dataclass

_LOSSES = "slime.algorithms.policy_loss"


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`function` takes `PolicyInputs` and `PolicyOptions` and returns `PolicyTerms`, per token."""

    function: str
    clips: bool = False  # reads --eps-clip and --eps-clip-high
    dual_clips: bool = False  # reads --eps-clip-c
    ratio_per_sample: bool = False  # defined as a mean over samples
    # Needs the log-probs of the whole optimizer step before its first pass.
    selects_by_covariance: bool = False
    flags: tuple[str, ...] = ()  # that this loss reads, beyond those above


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(f"{_LOSSES}.ppo", clips=True, dual_clips=True),
    "gspo": PolicyLoss(f"{_LOSSES}.gspo", clips=True, dual_clips=True, ratio_per_sample=True),
    "cispo": PolicyLoss(f"{_LOSSES}.cispo", clips=True),
    "sapo": PolicyLoss(f"{_LOSSES}.sapo", flags=("sapo_tau_pos", "sapo_tau_neg")),
    "gmpo": PolicyLoss(f"{_LOSSES}.gmpo", clips=True, ratio_per_sample=True),
    "clip_cov": PolicyLoss(
        f"{_LOSSES}.clip_cov",
        clips=True,
        dual_clips=True,
        selects_by_covariance=True,
        flags=("clip_cov_ratio", "clip_cov_low", "clip_cov_high"),
    ),
    "kl_cov": PolicyLoss(
        f"{_LOSSES}.kl_cov", selects_by_covariance=True, flags=("kl_cov_ratio", "kl_cov_coef")
    ),
    "dppo_tv": PolicyLoss(f"{_LOSSES}.dppo_tv", flags=("dppo_delta",)),
    "dppo_kl": PolicyLoss(f"{_LOSSES}.dppo_kl", flags=("dppo_delta",)),
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """`count`: by what of the step the weighted sum is divided. `by_length`: long samples count more."""

    count: str
    by_length: bool


REDUCTIONS: dict[str, Reduction] = {
    "rollout_mean": Reduction(
        "rollouts", by_length=False
    ),  # a token over its rollout's trained tokens, siblings together
    "sample_mean": Reduction("samples", by_length=False),  # over those of its own sample
    "token_mean": Reduction("tokens", by_length=True),  # over nothing
    "constant": Reduction("rollouts", by_length=True),  # over one constant (Dr. GRPO)
}
