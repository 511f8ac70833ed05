"""Attention to shared prefixes on a CPU: each part of the stream attends to the keys that it reads.

Tokens of a prefix are attended from once, and not once for each document that begins with it. Parts of
similar size are one batch of plain matrix products, padded on the right: what is padded is masked, or never
looked at.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime.backends.attention.short_products import attend_with_mask

# Keys of a part, up to which scores of a whole batch are kept; and of how many scores a batch is at most.
LONGEST = 512
_SCORES = 1 << 18
_PAD_TOKENS = 8
_PAD_SHARE = 8


@dataclass(slots=True)
class _Batch:
    query: Tensor  # [n * longest part] places in the stream; padding repeats a real one
    keys: Tensor  # [n * most keys] places in the stream
    hidden: Tensor  # [n, longest part, most keys] 0 where a key is seen and -inf elsewhere
    real: Tensor  # [n * longest part] whether it is no padding
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by heads, as products want them

    def mask(self, groups: int, count: int) -> Tensor:
        if (groups, count) not in self.masks:
            size, rows, columns = self.hidden.shape
            wide = self.hidden[:, None, :, None].expand(size, groups, rows, count, columns)
            self.masks[groups, count] = wide.reshape(size * groups, rows * count, columns)
        return self.masks[groups, count]


@dataclass(slots=True)
class PartBatches:
    """Batches of the parts, laid out when they are first attended with: bounds and keys as `PrefixTree`'s."""

    _made: tuple[list[_Batch], Tensor] | None = None

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
            self._made = _lay_out(cu_query.tolist(), cu_key.tolist(), keys)
        batches, rows = self._made
        heads, groups = query.shape[1], key.shape[1]
        results = []
        for batch in batches:
            size = len(batch.hidden)
            q, k, v = (
                stream.index_select(0, places).view(size, -1, *stream.shape[1:])
                for stream, places in ((query, batch.query), (key, batch.keys), (value, batch.keys))
            )
            mask = batch.mask(groups, heads // groups).to(query.dtype)
            results.append(attend_with_mask(q, k, v, mask, scale).flatten(0, 1))
        return (results[0] if len(results) == 1 else torch.cat(results)).index_select(0, rows)


def _lay_out(cu_query: list[int], cu_key: list[int], keys: Tensor) -> tuple[list[_Batch], Tensor]:
    """The batches, and for each token of the stream its row in their joined results."""
    sizes = [(b - a, d - c) for a, b, c, d in zip(cu_query, cu_query[1:], cu_key, cu_key[1:], strict=False)]
    batches = [
        _batch(members, sizes, cu_query, cu_key, keys) for members in _alike([(q, k) for q, k in sizes])
    ]
    rows = torch.cat([batch.real for batch in batches]).nonzero()[:, 0]
    row_of = torch.empty_like(rows)
    row_of[torch.cat([batch.query[batch.real] for batch in batches])] = rows
    return batches, row_of


def _alike(sizes: list[tuple[int, int]]) -> list[list[int]]:
    """Parts by (own tokens, keys), so that little is padded and the scores of a batch stay in a cache."""
    order = sorted((part for part, size in enumerate(sizes) if size[0]), key=lambda part: sizes[part][::-1])
    found: list[list[int]] = []
    least = most = keys = 0  # own tokens of the last batch's parts; the most keys of one
    for part in reversed(order):
        own, seen = sizes[part]
        low, high = min(least, own), max(most, own)
        alike = high - low <= max(_PAD_TOKENS, high // _PAD_SHARE)
        alike &= keys - seen <= max(_PAD_TOKENS, keys // _PAD_SHARE)
        if found and alike and (len(found[-1]) + 1) * high * keys <= _SCORES:
            found[-1].append(part)
            least, most = low, high
        else:
            found.append([part])
            least = most = own
            keys = seen
    return found


def _batch(
    members: list[int], sizes: list[tuple[int, int]], cu_query: list[int], cu_key: list[int], keys: Tensor
) -> _Batch:
    own, seen = (torch.tensor([sizes[m][axis] for m in members])[:, None] for axis in (0, 1))
    row, column = torch.arange(int(own.max())), torch.arange(int(seen.max()))
    starts = torch.tensor([cu_query[m] for m in members])[:, None]
    key_starts = torch.tensor([cu_key[m] for m in members])[:, None]
    places = starts + torch.where(row < own, row, 0)
    read = keys[key_starts + torch.where(column < seen, column, 0)]
    # The last token of a part sees all of its keys, the one before it one less, and so on.
    sees = column <= (seen - own + row)[:, :, None]
    hidden = torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf)
    return _Batch(places.flatten(), read.flatten(), hidden, (row < own).flatten())
