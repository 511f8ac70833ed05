"""Advantage estimators: the rows of `--advantage-estimator`."""

import functools
from dataclasses import dataclass

_ADVANTAGES = "slime.algorithms.advantages"


@dataclass(frozen=True, slots=True)
class Estimator:
    """One estimator. `function` maps `AdvantageInputs` to per-sample lists of advantages and returns."""

    function: str
    help: str
    # Row of algorithms.rewards.BASELINES that rewards are compared with; None: raw rewards.
    baseline: str | None = None
    scale_rewards: bool = False  # divide by the group's standard deviation too, unless switched off
    by_component: bool = False  # compare each entry of --reward-weights by itself, then add them up
    uses_kl_in_reward: bool = False  # --kl-coef enters the advantages
    uses_gamma: bool = False
    needs_values: bool = False  # reads the values of a critic
    policy_loss: str = "ppo"  # the default of --policy-loss-type
    reduction: str | None = None  # the default of --loss-reduction; None: the general one

    @property
    def compares_in_groups(self) -> bool:
        """Whether an estimator compares rewards within their group, without the greedy response."""
        return self.baseline is not None and not self.needs_greedy_response

    @property
    def needs_greedy_response(self) -> bool:
        """Whether each group needs an additional greedy response, whose reward is the baseline."""
        return self.baseline == "greedy"

    @property
    def divides_by_mean_reward(self) -> bool:
        """Whether an estimator divides by a group's mean reward, which must then not be negative."""
        return self.baseline == "success_rate"


_in_groups = functools.partial(Estimator, f"{_ADVANTAGES}.grpo")
ESTIMATORS: dict[str, Estimator] = {
    "ppo": Estimator(
        f"{_ADVANTAGES}.ppo",
        "generalised advantages over the values of a critic",
        uses_kl_in_reward=True,
        uses_gamma=True,
        needs_values=True,
    ),
    "grpo": _in_groups("reward against the mean of its group, over the group's std", "mean", True),
    "gspo": _in_groups(
        "as grpo, with one ratio per sample (the loss of that name)", "mean", True, policy_loss="gspo"
    ),
    "cispo": _in_groups(
        "as grpo, with clipped weights that keep every gradient", "mean", True, policy_loss="cispo"
    ),
    "gdpo": _in_groups(
        "grpo of each entry of --reward-weights; the sum is scaled by the batch", "mean", True, True
    ),
    "dr_grpo": _in_groups(
        "reward against the mean of its group; tokens over one constant", "mean", reduction="constant"
    ),
    "rloo": _in_groups("reward against the mean of the other responses of its group", "leave_one_out"),
    "remax": _in_groups("reward minus the reward of one greedy response", "greedy"),
    "opo": _in_groups("reward against the length-weighted mean of its group", "length_weighted"),
    "maxrl": _in_groups("reward against the success rate of its group, over that rate", "success_rate"),
    "reinforce_plus_plus": Estimator(
        f"{_ADVANTAGES}.reinforce_plus_plus",
        "discounted sum of reward and KL penalties",
        uses_kl_in_reward=True,
        uses_gamma=True,
    ),
    "reinforce_plus_plus_baseline": Estimator(
        f"{_ADVANTAGES}.reinforce_plus_plus_baseline",
        "reward against the mean of its group, less the KL penalty",
        "mean",
        uses_kl_in_reward=True,
    ),
}
# As flags and messages name them.
WITH_CRITIC = " or ".join(name for name, row in ESTIMATORS.items() if row.needs_values)
