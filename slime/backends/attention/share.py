"""What a rank computes in place of a micro-batch's own stream: shared prefixes once, its part, or both."""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.nucleus import Nucleus
from slime.backends.attention.documents import move_fields


@dataclass(frozen=True, slots=True)
class Share:
    """A stream of T tokens, and how its outputs become those of the micro-batch's R response tokens."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    documents: Any  # which tokens see each other; it has a method `attend`
    rows: Tensor  # [N] this rank's rows that predict something
    places: Tensor  # [N] a response token that each predicts
    copies: Tensor  # [T] for how many samples each token stands: padding for none
    nucleus: Nucleus | None  # of N rows
    which: Tensor | None = None  # [R] for each response token which prediction it is; None: its own
    # Only where the stream is spread over the ranks of a group:
    group: dist.ProcessGroup | None = None
    predicted: Tensor | None = None  # [N] which each is of the predictions of all ranks
    count: int = 0  # predictions of all ranks

    @property
    def is_whole(self) -> bool:
        """Whether all response tokens of the micro-batch are on this rank."""
        return self.group is None

    def join(self, values: Tensor) -> Tensor:
        """Values of all response tokens, [R], from this rank's, [N]."""
        if self.group is not None:
            assert self.predicted is not None, "a spread stream knows its place among all"
            values = place_tokens(values, self.predicted, self.count, self.group)
        return values if self.which is None else values.index_select(0, self.which)

    def to(self, device: torch.device) -> Self:
        return move_fields(self, device)


class _PlaceTokens(torch.autograd.Function):
    """Each rank's values at its places of one vector that all ranks then hold.

    All ranks compute the same loss from it, so the gradient of a rank's own values is its part, not a sum.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = torch.zeros(count, dtype=values.dtype, device=values.device)
        whole[places] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None


def place_tokens(values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """[R] values of all ranks from this rank's values at `places`; each place belongs to exactly one rank."""
    return _PlaceTokens.apply(values, places, count, group)
