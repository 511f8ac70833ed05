"""The token ids that sampling chose from, row by row, and logits restricted to them.

Top-p, top-k and min-p draw each token from a part of the vocabulary. Training then uses the softmax over the
kept ids alone, as the engine recorded them; other ids have probability 0, no entropy and no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Finite, so that probability 0 times its logarithm is 0 and not NaN; far below any logit.
IMPOSSIBLE = -1e30


@dataclass(frozen=True, slots=True)
class Nucleus:
    """The ids that each of R rows of logits was sampled from; a row without ids used the whole vocabulary.

    Example: ids [3, 7, 5], row_of [0, 0, 2], offsets [0, 2, 2, 3]: row 0 is 3 or 7, row 1 any, row 2 only 5.
    """

    ids: Tensor  # [N] int32, row after row
    row_of: Tensor  # [N] int32
    offsets: Tensor  # [R + 1] int64, always on the CPU: selecting rows never waits for a device

    @classmethod
    def of(cls, ids: Sequence[Tensor], offsets: Sequence[Tensor]) -> "Nucleus":
        """Concatenate samples: for each its ids [N_i] and the bounds [R_i + 1] of its rows in them."""
        counts = torch.cat([bounds.long().diff() for bounds in offsets])
        return cls._from_counts(torch.cat(list(ids)).int(), counts)

    @classmethod
    def _from_counts(cls, ids: Tensor, counts: Tensor) -> "Nucleus":
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)
        return cls(ids, rows.to(ids.device), offsets)

    def rows(self, start: int, stop: int) -> "Nucleus":
        """Return the rows `start <= r < stop`."""
        bounds = self.offsets[start : stop + 1]
        part = slice(int(bounds[0]), int(bounds[-1]))
        return Nucleus(self.ids[part], self.row_of[part] - start, bounds - bounds[0])

    def select(self, places: Tensor) -> "Nucleus":
        """Return the rows at `places`, in that order."""
        places = places.cpu()
        starts, counts = self.offsets[places], self.offsets.diff()[places]
        before = counts.cumsum(0) - counts
        index = torch.arange(int(counts.sum())) + torch.repeat_interleave(starts - before, counts)
        return self._from_counts(self.ids[index.to(self.ids.device)], counts)

    def to(self, device: torch.device) -> "Nucleus":
        ids, row_of = (tensor.to(device, non_blocking=True) for tensor in (self.ids, self.row_of))
        return Nucleus(ids, row_of, self.offsets)

    def cut_(self, logits: Tensor, targets: Tensor, first: int = 0) -> Tensor:
        """Mask logits [R, columns], which start at id `first`: all but each row's ids and `targets` [R]."""
        rows, columns = logits.shape
        keep = torch.zeros(rows * columns + 1, dtype=torch.bool, device=logits.device)
        every = torch.arange(rows, device=logits.device)
        for row, token in ((self.row_of.long(), self.ids.long()), (every, targets)):
            inside = (token >= first) & (token < first + columns)
            # Ids outside these columns are written to one extra column, so that no size depends on the data.
            keep.index_fill_(0, torch.where(inside, row * columns + token - first, rows * columns), True)
        is_cut = torch.zeros_like(every, dtype=torch.bool).index_fill_(0, self.row_of.long(), True)
        keep = keep[:-1].view(rows, columns).logical_or_(~is_cut[:, None])
        return logits.masked_fill_(keep.logical_not_(), IMPOSSIBLE)
