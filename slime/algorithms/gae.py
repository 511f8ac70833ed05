"""Generalised advantage estimation and discounted returns, one step at a time and in parallel chunks."""

from collections.abc import Sequence

import torch
from torch import Tensor


def vanilla_gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [B, T] by the textbook recursion; the value after the last token is 0."""
    result = torch.zeros_like(rewards)
    last = next_value = torch.zeros(len(rewards), dtype=rewards.dtype, device=rewards.device)
    for t in reversed(range(rewards.shape[1])):
        last = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lambd * last
        next_value = values[:, t]
        result[:, t] = last
    return result, result + values


def chunked_discounted_returns(rewards: Tensor, discount: float, chunk_size: int = 128) -> Tensor:
    """Return discounted sums from the end [B, T]: G_t = r_t + discount x G_{t+1}.

    Within a chunk all sums are one product with a triangular matrix; the carry between chunks is sequential.
    """
    if discount == 1.0 or rewards.shape[1] == 0:
        return rewards.flip(1).cumsum(1).flip(1)
    length = rewards.shape[1]
    size = min(chunk_size, length)
    steps = torch.arange(size, device=rewards.device)
    distance = steps[:, None] - steps[None, :]  # row: source position, column: target position
    powers = torch.where(distance >= 0, float(discount) ** distance.clamp(min=0).to(rewards.dtype), 0.0)
    result = torch.empty_like(rewards)
    carry = torch.zeros_like(rewards[:, :1])
    for end in range(length, 0, -size):
        start = max(end - size, 0)
        n = end - start
        until_end = float(discount) ** (n - steps[:n]).to(rewards.dtype)
        result[:, start:end] = rewards[:, start:end] @ powers[:n, :n] + carry * until_end
        carry = result[:, start : start + 1]
    return result


def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Compute `vanilla_gae` in chunks: advantages are discounted returns of the one-step errors."""
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = rewards + gamma * next_values - values
    advantages = chunked_discounted_returns(deltas, gamma * lambd, chunk_size)
    return advantages, advantages + values


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[Tensor],
    rewards_list: Sequence[Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute GAE of ragged responses: padded on the right (which changes nothing), then trimmed to [R_i]."""
    del total_lengths
    if not response_lengths:
        return [], []
    rewards = torch.nn.utils.rnn.pad_sequence(list(rewards_list), batch_first=True)
    values = torch.nn.utils.rnn.pad_sequence(list(values_list), batch_first=True)
    gae = chunked_gae if chunked else vanilla_gae
    advantages, returns = gae(rewards, values, gamma, lambd)
    return (
        [row[:n] for row, n in zip(advantages, response_lengths, strict=True)],
        [row[:n] for row, n in zip(returns, response_lengths, strict=True)],
    )
