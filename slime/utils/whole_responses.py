"""Provides THUDM/slime's context-parallel functions: here plug-ins always get whole responses."""

from typing import TypeVar

from torch import Tensor

T = TypeVar("T", Tensor, list[float])


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int, *_: object) -> Tensor:
    """Return the values of all response tokens unchanged: they are complete already."""
    return _whole(tensor, response_length)


def slice_log_prob_with_cp(log_prob: T, total_length: int, response_length: int, *_: object) -> T:
    """Return this rank's part of the values of response tokens: all of them."""
    return _whole(log_prob, response_length)


def _whole(values: T, response_length: int) -> T:
    if len(values) != response_length:
        raise ValueError(f"{len(values)} values for {response_length} response tokens: each needs one.")
    return values
