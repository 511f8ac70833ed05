"""Attention on a CPU for rows that share keys: spans of rows become one batch of plain matrix products.

Samples of one prompt share its keys and have few of their own. Rows that begin with the same pages are sorted
next to each other, and a span of such rows gathers each key once. Keys that not all rows of a span may see
are masked.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

_SPAN = 8  # rows
_MOST_SEEN = 1 << 15  # total keys of the rows, up to which the layout is worth its time
_WASTE = 4  # most scores per unmasked one


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Tokens `start..start+count` of a pass. n spans of L rows have K keys each; both are padded."""

    start: int
    count: int
    rows: Tensor  # [n, L] index of the row; padding repeats one
    place: Tensor  # [count] place of each row
    keys: Tensor  # [n, K] rows of the pool
    mask: Tensor  # [n, L, K] 0 where a key is seen and -inf elsewhere
    made: dict[tuple[int, ...], "_ForHeads"] = field(default_factory=dict)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        """[count, H, D] of query [T, H, D] and the pool's keys and values [P, G, D]."""
        (tokens, heads, width), groups = query.shape, keys.shape[1]
        layout = self._for_heads(heads, groups, tokens)
        by_head = query.transpose(0, 1).reshape(-1, width)  # memory layout of rotated queries
        rows = by_head.index_select(0, layout.rows).view(len(layout.mask), -1, width)
        key, value = (
            embedding(layout.keys, pool.view(-1, pool.shape[2])).view(len(rows), -1, pool.shape[2])
            for pool in (keys, values)
        )
        scale = width**-0.5 if scaling is None else scaling
        shares = torch.baddbmm(layout.mask, rows, key.transpose(1, 2), alpha=scale).softmax(-1)
        out = torch.bmm(shares, value).view(-1, value.shape[2])
        return out.index_select(0, layout.out).view(self.count, heads, -1)

    def _for_heads(self, heads: int, groups: int, tokens: int) -> "_ForHeads":
        """Return the layout for this number of heads; layers with equal heads share it."""
        if (heads, groups, tokens) not in self.made:
            (spans, length, keys), each = self.mask.shape, heads // groups
            group, head = torch.arange(groups)[:, None, None], torch.arange(heads).view(groups, 1, each)
            rows = (self.start + self.rows)[:, None, :, None] + tokens * head  # [n, G, L, H / G]
            span, row = self.place // length, self.place % length
            block = (span[:, None, None] * groups + group[:, 0]) * length + row[:, None, None]
            out = block * each + torch.arange(each)  # [count, G, H / G]
            mask = self.mask[:, None, :, None].expand(spans, groups, length, each, keys)
            self.made[heads, groups, tokens] = _ForHeads(
                rows.flatten(),
                (self.keys[:, None] * groups + group[:, 0]).flatten(),
                out.flatten(),
                mask.reshape(spans * groups, -1, keys),
            )
        return self.made[heads, groups, tokens]


@dataclass(frozen=True, slots=True)
class _ForHeads:
    """Rows of the vectors of one head: in queries ordered by head, in the pool, and in the result."""

    rows: Tensor  # [n x G x L x H / G]
    keys: Tensor  # [n x G x K]
    out: Tensor  # [count x H]
    mask: Tensor  # [n x G, L x H / G, K]


def lay_out(start: int, pages: np.ndarray, length: np.ndarray, page_size: int) -> SpanGroup | None:
    """Lay out rows that see the first `length` [R] keys of their `pages` [R, W]; None: it is not worth it."""
    seen, rows = int(length.sum()), len(length)
    if seen > _MOST_SEEN:
        return None
    order = np.lexsort(pages.T[::-1])
    place = np.empty(rows, np.int64)
    place[order] = np.arange(rows)
    row = np.repeat(np.arange(rows), length)
    at = np.arange(seen) - np.repeat(np.cumsum(length) - length, length)
    span, most, longest = place[row] // _SPAN, int(pages.max() + 1) * page_size, int(length.max())
    read = pages[row, at // page_size] * page_size + at % page_size
    # By position first: a sequence's pages depend on earlier requests, but its sums must not.
    found, which = np.unique((span * longest + at) * most + read, return_inverse=True)
    owner = found // (longest * most)
    spans = int(owner[-1]) + 1
    first = np.searchsorted(owner, np.arange(spans))
    widest = int(np.bincount(owner).max())
    if spans * _SPAN * widest > _WASTE * seen:
        return None
    keys = np.zeros((spans, widest), np.int64)
    keys[owner, np.arange(len(found)) - first[owner]] = found % most
    mask = np.full((spans * _SPAN, widest), -np.inf, np.float32)
    mask[place[row], which - first[span]] = 0
    mask[rows:, 0] = 0  # padding must see some key; its result is ignored
    stands = np.concatenate((order, np.full(spans * _SPAN - rows, order[-1])))
    as_tensor = torch.from_numpy
    wide = as_tensor(mask).view(spans, _SPAN, widest)
    return SpanGroup(start, rows, as_tensor(stands).view(-1, _SPAN), as_tensor(place), as_tensor(keys), wide)
