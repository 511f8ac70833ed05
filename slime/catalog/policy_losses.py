"""Policy losses and reductions: the rows of `--policy-loss-type` and `--loss-reduction`."""

from dataclasses import dataclass

_LOSSES = "slime.algorithms.policy_loss"


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`function` takes `PolicyInputs` and `PolicyOptions` and returns `PolicyTerms`, per token."""

    function: str
    help: str
    clips: bool = False  # reads --eps-clip and --eps-clip-high
    dual_clips: bool = False  # reads --eps-clip-c
    ratio_per_sample: bool = False  # defined as a mean over samples
    # Needs the log-probs of the whole optimizer step before its first pass.
    selects_by_covariance: bool = False
    scales_with_advantage: bool = False  # where a token has none, it has no gradient
    flags: tuple[str, ...] = ()  # that this loss reads, beyond those above


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(
        f"{_LOSSES}.ppo", "ratio per token, clipped", clips=True, dual_clips=True, scales_with_advantage=True
    ),
    "gspo": PolicyLoss(
        f"{_LOSSES}.gspo",
        "one ratio per sample, clipped",
        clips=True,
        dual_clips=True,
        ratio_per_sample=True,
        scales_with_advantage=True,
    ),
    "cispo": PolicyLoss(
        f"{_LOSSES}.cispo",
        "clipped ratio as a weight without gradient",
        clips=True,
        scales_with_advantage=True,
    ),
    "sapo": PolicyLoss(
        f"{_LOSSES}.sapo", "a soft gate in place of the clip", flags=("sapo_tau_pos", "sapo_tau_neg")
    ),
    "gmpo": PolicyLoss(
        f"{_LOSSES}.gmpo", "geometric mean of a sample's ratios", clips=True, ratio_per_sample=True
    ),
    "clip_cov": PolicyLoss(
        f"{_LOSSES}.clip_cov",
        "as ppo; some tokens of high covariance give no gradient",
        clips=True,
        dual_clips=True,
        selects_by_covariance=True,
        flags=("clip_cov_ratio", "clip_cov_low", "clip_cov_high"),
    ),
    "kl_cov": PolicyLoss(
        f"{_LOSSES}.kl_cov",
        "tokens of the highest covariance pay a KL penalty",
        selects_by_covariance=True,
        flags=("kl_cov_ratio", "kl_cov_coef"),
    ),
    "dppo_tv": PolicyLoss(
        f"{_LOSSES}.dppo_tv", "no gradient beyond a total variation per token", flags=("dppo_delta",)
    ),
    "dppo_kl": PolicyLoss(f"{_LOSSES}.dppo_kl", "no gradient beyond a KL per token", flags=("dppo_delta",)),
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """`count`: by what of the step the weighted sum is divided. `by_length`: long samples count more."""

    count: str
    help: str
    by_length: bool


REDUCTIONS: dict[str, Reduction] = {
    "rollout_mean": Reduction("rollouts", "a token over its rollout's trained tokens", by_length=False),
    "sample_mean": Reduction("samples", "a token over its sample's trained tokens", by_length=False),
    "token_mean": Reduction("tokens", "a token over nothing", by_length=True),
    "constant": Reduction("rollouts", "a token over one constant (Dr. GRPO)", by_length=True),
}
