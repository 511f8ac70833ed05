"""Advantage estimators: the rows of `--advantage-estimator`."""

from dataclasses import dataclass

_ADVANTAGES = "slime.algorithms.advantages"


@dataclass(frozen=True, slots=True)
class Estimator:
    """`function` takes `AdvantageInputs` and returns per-sample lists of advantages and returns.

    Example: grpo compares a reward with the mean of its group and divides by the group's standard deviation.
    """

    function: str
    help: str
    # Row of algorithms.rewards.BASELINES that rewards are compared with; None: raw rewards.
    baseline: str | None = None
    scale_rewards: bool = False  # divide by the group's standard deviation too, unless switched off
    uses_kl_in_reward: bool = False  # --kl-coef enters the advantages
    uses_gamma: bool = False
    needs_values: bool = False  # of a critic
    policy_loss: str = "ppo"  # of --policy-loss-type, unless another is chosen
    reduction: str | None = None  # of --loss-reduction, likewise; None: that of the run

    @property
    def compares_in_groups(self) -> bool:
        """Whether rewards are compared within their group, to which a greedy answer does not belong."""
        return self.baseline is not None and not self.needs_greedy_answer

    @property
    def needs_greedy_answer(self) -> bool:
        """Whether a group has a greedy answer beside its samples, whose reward is the baseline."""
        return self.baseline == "greedy"

    @property
    def divides_by_mean_reward(self) -> bool:
        """Whether the mean reward of a group is a divisor, which must not be negative."""
        return self.baseline == "success_rate"


ESTIMATORS: dict[str, Estimator] = {
    "ppo": Estimator(
        f"{_ADVANTAGES}.ppo",
        "generalised advantages over the values of a critic",
        uses_kl_in_reward=True,
        uses_gamma=True,
        needs_values=True,
    ),
    "grpo": Estimator(
        f"{_ADVANTAGES}.grpo",
        "reward against the mean of its group, over the group's std",
        baseline="mean",
        scale_rewards=True,
    ),
    "gspo": Estimator(
        f"{_ADVANTAGES}.grpo",
        "as grpo, with one ratio per sample (the loss of that name)",
        baseline="mean",
        scale_rewards=True,
        policy_loss="gspo",
    ),
    "cispo": Estimator(
        f"{_ADVANTAGES}.grpo",
        "as grpo, with clipped weights that keep every gradient (the loss of that name)",
        baseline="mean",
        scale_rewards=True,
        policy_loss="cispo",
    ),
    "dr_grpo": Estimator(
        f"{_ADVANTAGES}.grpo",
        "reward against the mean of its group; tokens over one constant",
        baseline="mean",
        reduction="constant",
    ),
    "rloo": Estimator(
        f"{_ADVANTAGES}.grpo",
        "reward against the mean of the other answers of its group",
        baseline="leave_one_out",
    ),
    "remax": Estimator(f"{_ADVANTAGES}.grpo", "reward against that of one greedy answer", baseline="greedy"),
    "opo": Estimator(
        f"{_ADVANTAGES}.grpo",
        "reward against the length-weighted mean of its group",
        baseline="length_weighted",
    ),
    "maxrl": Estimator(
        f"{_ADVANTAGES}.grpo",
        "reward against the success rate of its group, over that rate",
        baseline="success_rate",
    ),
    "reinforce_plus_plus": Estimator(
        f"{_ADVANTAGES}.reinforce_plus_plus",
        "discounted sum of reward and KL penalties",
        uses_kl_in_reward=True,
        uses_gamma=True,
    ),
    "reinforce_plus_plus_baseline": Estimator(
        f"{_ADVANTAGES}.reinforce_plus_plus_baseline",
        "reward against the mean of its group, less the KL penalty",
        baseline="mean",
        uses_kl_in_reward=True,
    ),
}
# As flags and messages name them.
WITH_CRITIC = " or ".join(name for name, row in ESTIMATORS.items() if row.needs_values)
