"""Assigns credit per turn of an episode, compared with the same turn of other rollouts of the group.

A turn is a span of tokens that the policy sampled in one request, with the environment's reward for it. Its
return is G_k = r_k + discount x G_(k+1). Estimators that compare rewards within a group compare G_k with the
k-th turn of the group's other rollouts; a shorter rollout counts with its last turn. If only the end is
rewarded and the discount is 1, every turn gets the advantage of the whole episode.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Turn = tuple[int, int, float]  # start and end in the response, and the reward
Compare = Callable[[list[float]], list[float]]  # numbers of the samples -> the same minus their baselines


def whole_turns(turns: Sequence[Turn] | None, response_length: int, reward: float) -> list[Turn]:
    """Return the turns of a sample, with the last turn's reward raised so that they add up to `reward`.

    A sample without turns is one turn.
    """
    if not turns:
        return [(0, response_length, reward)]
    start, end, last = turns[-1]
    missing = reward - sum(own for _, _, own in turns)
    return [*turns[:-1], (start, end, last + missing)]


def turn_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return G_k of each turn. Example: rewards [0, 1, 4] at discount 0.5 give [1.5, 3, 4]."""
    returns = itertools.accumulate(reversed(rewards), lambda following, own: own + discount * following)
    return [*returns][::-1]


def compared_returns(turns: Sequence[Sequence[Turn]], discount: float, compare: Compare) -> list[list[float]]:
    """Return for each sample and turn its return minus the baseline of that turn, by `compare`."""
    returns = [turn_returns([reward for _, _, reward in own], discount) for own in turns]
    result: list[list[float]] = [[] for _ in turns]
    for k in range(max(map(len, returns), default=0)):
        at_turn = compare([own[min(k, len(own) - 1)] for own in returns])
        for own, made, value in zip(returns, result, at_turn, strict=True):
            if k < len(own):
                made.append(value)
    return result


def on_all_tokens(turns: Sequence[Turn], values: Sequence[float], response_length: int) -> Tensor:
    """Return [R]: each token gets the value of its turn; untrained tokens between turns get 0."""
    tokens = torch.zeros(response_length)
    for (start, end, _), value in zip(turns, values, strict=True):
        tokens[start:end] = value
    return tokens


def on_last_tokens(turns: Sequence[Turn], loss_mask: Tensor) -> Tensor:
    """Put each turn's reward on its last trained token [R]; if a turn has none, on the nearest one before it,
    else the first after it.
    """
    tokens = torch.zeros(len(loss_mask))
    trained = loss_mask.nonzero().squeeze(1)
    for _, end, reward in turns:
        if len(trained):
            before = trained[trained < end]
            tokens[before[-1] if len(before) else trained[0]] += reward
    return tokens
