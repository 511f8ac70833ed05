"""Advantage estimators: the functions behind the rows of `catalog.estimators`.

Every estimator takes one `AdvantageInputs` (per-sample lists over full responses) and returns
per-sample lists of advantages and returns [R_i].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.gae import chunked_discounted_returns, get_advantages_and_returns_batch
from slime.catalog.estimators import ESTIMATORS
from slime.utils.misc import load_function

TokenLists = list[Tensor]


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage estimator: a batch of N samples."""

    rewards: Sequence[float]
    kl: Sequence[Tensor]  # [R_i] fp32, zeros when no KL enters the reward
    loss_masks: Sequence[Tensor]  # [R_i] 0/1
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0
    values: Sequence[Tensor] | None = None  # [R_i]; None: no critic
    # [R_i], see slime.algorithms.turn_credit; None: each sample has one reward, that of `rewards`
    token_rewards: Sequence[Tensor] | None = None

    def of_samples(self) -> TokenLists:
        """Return [R_i]: the reward of each token, for rewards that count for a whole sample or turn."""
        if self.token_rewards is not None:
            return [own.to(k) for own, k in zip(self.token_rewards, self.kl, strict=True)]
        return get_grpo_returns(self.rewards, self.kl)

    def of_actions(self, chosen: Sequence[Tensor]) -> TokenLists:
        """Return the rewards of the tokens at `chosen`, each on the last token of its sample or turn."""
        if self.token_rewards is None:
            return _rewards_of_actions(self.rewards, self.kl, chosen, self.kl_coef)
        triples = zip(self.token_rewards, self.kl, chosen, strict=True)
        return [own.to(k)[index] - self.kl_coef * k[index] for own, k, index in triples]


def get_grpo_returns(rewards: Sequence[float] | Tensor, kl: Sequence[Tensor]) -> TokenLists:
    """Put the sample's reward on each of its tokens; `kl` only gives the shapes."""
    if not kl:
        return []
    lengths = [len(k) for k in kl]
    values = torch.as_tensor(rewards, dtype=kl[0].dtype, device=kl[0].device)
    return list(torch.repeat_interleave(values, torch.tensor(lengths, device=values.device)).split(lengths))


def get_reinforce_plus_plus_returns(
    rewards: Sequence[float] | Tensor,
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int] | None = None,
    total_lengths: Sequence[int] | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
) -> TokenLists:
    """Sum discounted rewards: -kl_coef x kl on each trained token, and the sample's reward on the last.

    Tokens that are not trained get 0, and no discount is counted for them. The two length arguments are part
    of the public signature; full responses do not need them.
    """
    del response_lengths, total_lengths
    chosen = [mask.nonzero().squeeze(1) for mask in loss_masks]
    return _discounted(_rewards_of_actions(rewards, kl, chosen, kl_coef), chosen, kl, gamma)


def _discounted(
    token_rewards: Sequence[Tensor], chosen: Sequence[Tensor], like: Sequence[Tensor], gamma: float
) -> TokenLists:
    returns = [chunked_discounted_returns(actions[None], gamma)[0] for actions in token_rewards]
    return _at_actions(returns, chosen, like)


def _rewards_of_actions(
    rewards: Sequence[float] | Tensor, kl: Sequence[Tensor], chosen: Sequence[Tensor], kl_coef: float
) -> TokenLists:
    """Return the rewards of the tokens that the policy sampled (`chosen`); tool output is not discounted."""
    token_rewards = []
    for reward, k, index in zip(rewards, kl, chosen, strict=True):
        actions = -kl_coef * k[index]
        if len(index):
            actions[-1] += float(reward)
        token_rewards.append(actions)
    return token_rewards


def _at_actions(values: Sequence[Tensor], chosen: Sequence[Tensor], like: Sequence[Tensor]) -> TokenLists:
    """Return [R_i] with the values at the chosen tokens and 0 elsewhere."""
    return [
        torch.zeros_like(full).index_copy(0, index, part)
        for full, index, part in zip(like, chosen, values, strict=True)
    ]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float] | Tensor, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> TokenLists:
    """Subtract kl_coef x kl of each token from the group-centred reward."""
    del loss_masks
    return [float(reward) - kl_coef * k for reward, k in zip(rewards, kl, strict=True)]


def grpo(inputs: AdvantageInputs) -> tuple[TokenLists, TokenLists]:
    returns = inputs.of_samples()
    return returns, list(returns)


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[TokenLists, TokenLists]:
    chosen = [mask.nonzero().squeeze(1) for mask in inputs.loss_masks]
    returns = _discounted(inputs.of_actions(chosen), chosen, inputs.kl, inputs.gamma)
    return returns, list(returns)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[TokenLists, TokenLists]:
    pairs = zip(inputs.of_samples(), inputs.kl, strict=True)
    advantages = [own - inputs.kl_coef * k for own, k in pairs]
    return advantages, list(advantages)


def ppo(inputs: AdvantageInputs) -> tuple[TokenLists, TokenLists]:
    """Compute GAE over the trained tokens, with the reward on the last one; other tokens get 0."""
    assert inputs.values is not None, "ppo needs the critic's values"
    chosen = [mask.nonzero().squeeze(1) for mask in inputs.loss_masks]
    rewards = inputs.of_actions(chosen)
    values = [value[index] for value, index in zip(inputs.values, chosen, strict=True)]
    lengths = [len(index) for index in chosen]
    packed = get_advantages_and_returns_batch(lengths, lengths, values, rewards, inputs.gamma, inputs.lambd)
    advantages, returns = (_at_actions(parts, chosen, inputs.kl) for parts in packed)
    return advantages, returns


def compute_advantages(estimator: str, inputs: AdvantageInputs) -> tuple[TokenLists, TokenLists]:
    """Run the estimator with that catalog name; return per-sample lists of advantages and returns."""
    return load_function(ESTIMATORS[estimator].function)(inputs)


def masked_moments(values: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """Return [3] float64: sum, sum of squares and count of the masked tokens. Ranks add theirs up."""
    total = torch.zeros(3, dtype=torch.float64)
    for value, mask in zip(values, masks, strict=True):
        value, mask = value.double().cpu(), mask.double().cpu()
        total += torch.stack([(value * mask).sum(), (value.square() * mask).sum(), mask.sum()])
    return total


def whiten(values: Sequence[Tensor], moments: Tensor) -> TokenLists:
    """Shift and scale to mean 0 and variance 1 given the (global) `masked_moments`, with Bessel's correction.

    Without any trained token the result is all zeros, which nothing reads.
    """
    total, squares, count = moments.tolist()
    if count == 0:
        return [torch.zeros_like(value) for value in values]
    mean = total / count
    variance = max(squares / count - mean * mean, 0.0)
    if count > 1:
        variance *= count / (count - 1)
    scale = (variance + 1e-8) ** -0.5
    return [(value - mean) * scale for value in values]
