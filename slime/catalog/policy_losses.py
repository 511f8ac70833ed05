"""Policy losses and reductions: the rows of `--policy-loss-type` and `--loss-reduction`."""

from dataclasses import dataclass
from typing import Any

from slime.catalog.named_numbers import NamedNumber

_LOSSES = "slime.algorithms.policy_loss"


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """One loss. `function` maps `PolicyInputs` and `PolicyOptions` to `PolicyTerms`, per token."""

    function: str
    help: str
    clips: bool = False  # reads --eps-clip and --eps-clip-high
    dual_clips: bool = False  # reads --eps-clip-c
    ratio_per_sample: bool = False  # defined as a mean over samples
    scales_with_advantage: bool = False  # where a token has none, it has no gradient
    args: tuple[str, ...] = ()  # names of --policy-loss-args that this loss reads


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
        f"{_LOSSES}.sapo", "a soft gate in place of the clip", args=("sapo_tau_pos", "sapo_tau_neg")
    ),
    "gmpo": PolicyLoss(
        f"{_LOSSES}.gmpo", "geometric mean of a sample's ratios", clips=True, ratio_per_sample=True
    ),
    "dppo_tv": PolicyLoss(
        f"{_LOSSES}.dppo_tv", "no gradient beyond a total variation per token", args=("dppo_delta",)
    ),
    "dppo_kl": PolicyLoss(f"{_LOSSES}.dppo_kl", "no gradient beyond a KL per token", args=("dppo_delta",)),
}


POLICY_LOSS_ARGS: dict[str, NamedNumber] = {
    "sapo_tau_pos": NamedNumber(1.0, "sapo: steepness of the gate for positive advantages", gt=0),
    "sapo_tau_neg": NamedNumber(1.05, "sapo: steepness of the gate for other advantages", gt=0),
    "dppo_delta": NamedNumber(0.15, "dppo: how far the probability of a token may move", gt=0),
}


def policy_loss_arg(args: Any, name: str) -> float:
    """Return a number of --policy-loss-args, or its default."""
    return float(args.policy_loss_args.get(name, POLICY_LOSS_ARGS[name].default))


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduction. `count`: the divisor of the weighted sum. `by_length`: long samples count more."""

    count: str
    help: str
    by_length: bool


REDUCTIONS: dict[str, Reduction] = {
    "rollout_mean": Reduction("rollouts", "a token over its rollout's trained tokens", by_length=False),
    "sample_mean": Reduction("samples", "a token over its sample's trained tokens", by_length=False),
    "token_mean": Reduction("tokens", "a token over nothing", by_length=True),
    "constant": Reduction("rollouts", "a token over one constant (Dr. GRPO)", by_length=True),
}
