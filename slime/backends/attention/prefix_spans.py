"""Attention to shared prefixes on a CPU: the stream is cut into spans of as many tokens each.

A token of a span sees tokens of its span and, of those before it, only ancestors of the span's first token:
what this one begins with. So a span has few keys, and all spans are one batch of plain matrix products.

    stream  [P A1] [A2] [Q B1]     spans  [P A1 | A2 Q | B1]     keys of the second span: A2 Q, and P
"""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from slime.backends.attention.short_products import gradients, shares_of

# Keys that a token sees, up to which scores are kept for the backward pass; and of how many scores of a head
# a batch is at most: they stay in a cache.
LONGEST = 512
_SCORES = 1 << 18
# Tokens of a span: more of them see more of each other in vain, fewer gather the same keys more often.
_SPAN = 32


@dataclass(slots=True)
class _Batch:
    """Spans one behind the other: those of the stream's tokens `first` to `end`."""

    first: int
    end: int
    keys: Tensor  # [n, K] places in the stream: those of the span, then what its first token begins with
    hidden: Tensor  # [n, L, K] 0 where a key is seen and -inf elsewhere
    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def for_heads(self, heads: int, groups: int, tokens: int) -> tuple[Tensor, Tensor]:
        """[n x G x K] places in keys that lie by head, and the mask [n x G, H / G x L, K]."""
        if (heads, groups) not in self.made:
            size, rows, columns = self.hidden.shape
            places = self.keys[:, None] + tokens * torch.arange(groups)[:, None]
            mask = self.hidden[:, None, None].expand(size, groups, heads // groups, rows, columns)
            self.made[heads, groups] = places.flatten(), mask.reshape(size * groups, -1, columns)
        return self.made[heads, groups]


@dataclass(slots=True)
class SpanBatches:
    """Spans of a stream, laid out when they are first attended with: bounds and keys as `PrefixTree`'s."""

    _made: list[_Batch] | None = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_query: Tensor,
        cu_key: Tensor,
        keys: Tensor,
        scale: float,
    ) -> Tensor:
        """[T, H, D] in float32 or more."""
        if self._made is None:
            self._made = _lay_out(*(x.long().numpy() for x in (cu_query, cu_key, keys)))
        results = []
        for batch in self._made:
            places, mask = batch.for_heads(query.shape[1], key.shape[1], len(key))
            part = query[batch.first : batch.end]
            results.append(_Attention.apply(part, key, value, places, mask.to(query.dtype), scale))
        return cast(Tensor, results[0] if len(results) == 1 else torch.cat(results))


def _lay_out(cu_query: np.ndarray, cu_key: np.ndarray, keys: np.ndarray) -> list[_Batch]:
    own, tokens = np.diff(cu_query), int(cu_query[-1])
    part = np.repeat(np.arange(len(own)), own)  # of each token of the stream
    path = cu_key[part]  # where in `keys` that begins which the token begins with
    ancestors = (np.diff(cu_key) - own)[part] + np.arange(tokens) - cu_query[part]
    step = _SPAN * max(1, _SCORES // (_SPAN * (_SPAN + int(ancestors[::_SPAN].max()))))
    return [
        _batch(first, min(first + step, tokens), path, ancestors, keys) for first in range(0, tokens, step)
    ]


def _batch(first: int, end: int, path: np.ndarray, ancestors: np.ndarray, keys: np.ndarray) -> _Batch:
    starts, size = np.arange(first, end, _SPAN), _SPAN
    before = ancestors[starts]
    column = np.arange(int(before.max()))
    seen = np.minimum(path[starts, None] + column, len(keys) - 1)
    outside = np.where(column < before[:, None], keys[seen], 0)
    inside = np.minimum(starts[:, None] + np.arange(size), end - 1)
    hidden = np.full((len(starts), size, size + len(column)), -np.inf, np.float32)
    # Each token with each of its ancestors and itself: (token, how far from the beginning).
    counts = ancestors[first:end] + 1
    token = np.repeat(np.arange(first, end), counts)
    depth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    other = keys[path[token] + depth]
    span, row = np.divmod(token - first, size)
    hidden[span, row, np.where(other >= starts[span], other - starts[span], size + depth)] = 0
    hidden[-1, end - starts[-1] :, 0] = 0  # padding sees something: nobody looks at what that gives
    return _Batch(
        first, end, torch.from_numpy(np.concatenate((inside, outside), 1)), torch.from_numpy(hidden)
    )


def _cut(stream: Tensor, size: int, groups: int) -> Tensor:
    """[n x G, H / G x L, D] of [T, H, D]: the rows of a product are a span's, of all heads of a key head."""
    tokens, heads, width = stream.shape
    whole = tokens // size
    spans = stream.new_empty(-(-tokens // size), heads, size, width)
    by_head = stream.transpose(0, 1)
    spans[:whole] = by_head[:, : whole * size].unflatten(1, (whole, size)).transpose(0, 1)
    if rest := tokens - whole * size:
        spans[whole, :, :rest] = by_head[:, whole * size :]
        spans[whole, :, rest:] = 0
    return spans.view(len(spans) * groups, -1, width)


def _join(rows: Tensor, size: int, heads: int, tokens: int) -> Tensor:
    """The inverse: [T, H, D]."""
    spans = rows.view(-1, heads, size, rows.shape[-1]).transpose(1, 2)
    return spans.reshape(-1, heads, rows.shape[-1])[:tokens]


def _gather(stream: Tensor, places: Tensor, size: int) -> Tensor:
    """[n x G, K, D] of [T, G, D]."""
    by_head = stream.transpose(0, 1).reshape(-1, stream.shape[-1])
    return by_head.index_select(0, places).view(size, -1, stream.shape[-1])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, places: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        tokens, heads, _ = query.shape
        groups = key.shape[1]
        size = mask.shape[1] * groups // heads
        rows = _cut(query, size, groups)
        keys, values = (_gather(x, places, len(mask)) for x in (key, value))
        shares = shares_of(rows, keys, mask, scale)
        ctx.save_for_backward(rows, keys, values, shares, places)
        ctx.scale, ctx.shape = scale, (size, groups, len(key))
        return _join(torch.bmm(shares, values), size, heads, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, keys, values, shares, places = ctx.saved_tensors
        size, groups, count = ctx.shape
        grad_rows, *wide = gradients(_cut(grad, size, groups), rows, keys, values, shares, ctx.scale)
        # What several spans read gets the sum of their gradients.
        grad_key, grad_value = (
            x.new_zeros(groups * count, x.shape[-1])
            .index_add_(0, places, x.view(-1, x.shape[-1]))
            .view(groups, count, -1)
            .transpose(0, 1)
            for x in wide
        )
        tokens, heads, _ = grad.shape
        return _join(grad_rows, size, heads, tokens), grad_key, grad_value, None, None, None
