"""Rearranges the stream of a micro-batch: shared prefixes are computed once, or each rank computes a part."""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.nucleus import Nucleus
from slime.backends.attention.documents import move_fields


@dataclass(frozen=True, slots=True)
class Share:
    """A stream of T tokens, and the mapping of its outputs to the micro-batch's R response tokens."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    documents: Any  # which tokens see each other; it has a method `attend`
    rows: Tensor  # [N] this rank's rows that predict a token
    places: Tensor  # [N] a response token that each predicts
    copies: Tensor  # [T] number of samples that share each token; 0 for padding
    nucleus: Nucleus | None  # of N rows
    which: Tensor | None = None  # [R] for each response token which row predicts it, if prefixes are shared
    group: dist.ProcessGroup | None = None  # ranks over which the stream is split; None: not split
    count: int = 0  # response tokens on all ranks of the group
    experts: Tensor | None = None  # [T, layers, top k] choices to replay on this rank's part of the stream
    images: Any = None  # `MicroBatch.images` of this stream

    @property
    def is_whole(self) -> bool:
        """Return whether all response tokens of the micro-batch are on this rank."""
        return self.group is None

    def join(self, values: Tensor) -> Tensor:
        """Return the values [R] of all response tokens, given the values [N] of this rank."""
        if self.group is not None:
            return PlaceTokens.apply(values, self.places, self.count, self.group)
        return values if self.which is None else values.index_select(0, self.which)

    def to(self, device: torch.device) -> Self:
        return move_fields(self, device)


class PlaceTokens(torch.autograd.Function):
    """Combines each rank's values, each place of one rank alone, into one vector that all ranks then hold.

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
