"""Losses over a preferred and a rejected answer: DPO for a policy, Bradley-Terry for a reward model."""

import torch.nn.functional as F
from torch import Tensor


def compute_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss [P] and both implicit rewards [P], from summed log-probs [P] of policy and reference.

    An implicit reward is beta x (log pi - log pi_ref); the loss is -log sigmoid of their difference.
    """
    chosen_rewards = beta * (chosen - ref_chosen)
    rejected_rewards = beta * (rejected - ref_rejected)
    loss = -F.logsigmoid(chosen_rewards - rejected_rewards)
    return loss, chosen_rewards.detach(), rejected_rewards.detach()


def compute_bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Loss [P] of the scores [P]: -log sigmoid(chosen - rejected - margin)."""
    return -F.logsigmoid(chosen - rejected - margin)
