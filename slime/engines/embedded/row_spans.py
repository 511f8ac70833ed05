"""Attention of rows that read the same keys, on a CPU: spans of rows are one batch of plain matrix products.

Samples of one prompt read its keys, and each of them the few of its own; tokens of a prompt read those before
them. Rows that begin with the same pages stand side by side, and a span of them gathers each key once. What
not all of its rows may see is masked.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_SPAN = 8  # rows
_MOST_SEEN = 1 << 15  # keys that rows see, all together, up to which laying out is worth the time
_WASTE = 4  # scores for each one that is not masked, at most


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Tokens `start..start+count` of a pass. n spans of L rows have K keys each; both are padded."""

    start: int
    count: int
    rows: Tensor  # [n x L] the row that stands there; padding repeats one
    place: Tensor  # [count] where each row stands
    keys: Tensor  # [n x K] rows of the pool
    mask: Tensor  # [n, L, K] 0 where a key is seen and -inf elsewhere
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by heads, as products want them

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        """[count, H, D] of query [T, H, D] and the pool's keys and values [P, G, D]."""
        spans, length, _ = self.mask.shape
        heads, width = query.shape[1:]
        groups = keys.shape[1]
        rows = query[self.start : self.start + self.count].index_select(0, self.rows)
        rows = rows.view(spans, length, groups, -1, width).transpose(1, 2).reshape(spans * groups, -1, width)
        key, value = (
            pool.index_select(0, self.keys).view(spans, -1, groups, pool.shape[2]) for pool in (keys, values)
        )
        key = key.permute(0, 2, 3, 1).reshape(spans * groups, width, -1)
        value = value.transpose(1, 2).reshape(spans * groups, -1, values.shape[2])
        scale = width**-0.5 if scaling is None else scaling
        shares = torch.baddbmm(self._mask_of(groups, heads // groups), rows, key, alpha=scale).softmax(-1)
        out = torch.bmm(shares, value).view(spans, groups, length, -1, values.shape[2]).transpose(1, 2)
        return out.reshape(spans * length, heads, -1).index_select(0, self.place)

    def _mask_of(self, groups: int, count: int) -> Tensor:
        if (groups, count) not in self.masks:
            spans, length, keys = self.mask.shape
            wide = self.mask[:, None, :, None].expand(spans, groups, length, count, keys)
            self.masks[groups, count] = wide.reshape(spans * groups, -1, keys)
        return self.masks[groups, count]


def lay_out(start: int, pages: np.ndarray, length: np.ndarray, page_size: int) -> SpanGroup | None:
    """Rows that see the first `length` [R] keys of their `pages` [R, W]; None: such a group does not pay."""
    seen, rows = int(length.sum()), len(length)
    if seen > _MOST_SEEN:
        return None
    order = np.lexsort(pages.T[::-1])
    place = np.empty(rows, np.int64)
    place[order] = np.arange(rows)
    row = np.repeat(np.arange(rows), length)
    at = np.arange(seen) - np.repeat(np.cumsum(length) - length, length)
    span, most = place[row] // _SPAN, int(pages.max() + 1) * page_size
    read = pages[row, at // page_size] * page_size + at % page_size
    found, which = np.unique(span * most + read, return_inverse=True)
    owner = found // most
    spans = int(owner[-1]) + 1
    first = np.searchsorted(owner, np.arange(spans))
    widest = int(np.bincount(owner).max())
    if spans * _SPAN * widest > _WASTE * seen:
        return None
    keys = np.zeros((spans, widest), np.int64)
    keys[owner, np.arange(len(found)) - first[owner]] = found % most
    mask = np.full((spans * _SPAN, widest), -np.inf, np.float32)
    mask[place[row], which - first[span]] = 0
    mask[rows:, 0] = 0  # padding sees something: nobody looks at what that gives
    stands = np.concatenate((order, np.full(spans * _SPAN - rows, order[-1])))
    as_tensor = torch.from_numpy
    wide = as_tensor(mask).view(spans, _SPAN, widest)
    return SpanGroup(start, rows, as_tensor(stands), as_tensor(place), as_tensor(keys.reshape(-1)), wide)
