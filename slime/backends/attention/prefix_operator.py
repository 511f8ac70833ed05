"""Attention with keys that several parts of a stream share, with its backward pass, as one operator.

The gradient of a key is the sum over all parts that read it and over the query heads that share its key head.
Kernels give each part a copy of its keys for every query head; the gradients of the copies are added up in
one pass that reads each once. Autograd would sum over heads and then add at indices, which takes as long as
the attention itself.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slime.backends.attention.attention_operator import packed_operator
from slime.backends.attention.prefix_passes import Bounds, Passes, passes_for


class Readers(NamedTuple):
    """Maps token t of a stream to its copies among the keys: places from `ends`[t] to `ends`[t + 1]."""

    places: Tensor  # [S] int32
    ends: Tensor  # [T + 1] int32


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    readers: Tensor,
    reader_ends: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    longest: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    bounds = Bounds(cu_query, cu_key, int(longest))
    key, value = key.index_select(0, keys), value.index_select(0, keys)
    out, sums = _passes(query, key).forward(query, key, value, bounds, scale)
    return out, sums.flatten()


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    keys: Tensor,
    readers: Tensor,
    reader_ends: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    longest: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (tokens, heads, _width), bounds = query.shape, Bounds(cu_query, cu_key, int(longest))
    wide_key, wide_value = (_for_each_head(x, heads).index_select(0, keys) for x in (key, value))
    grad_query, *wide = _passes(query, key).backward(
        grad, query, wide_key, wide_value, out, sums.view(heads, tokens), bounds, scale
    )
    grad_key, grad_value = (collect(x, readers, reader_ends, key.shape[1]) for x in wide)
    return grad_query, grad_key, grad_value


def _passes(query: Tensor, key: Tensor) -> Passes:
    return passes_for(query.shape[1], key.shape[1], query.shape[2], query.dtype, query.device)


# [T, H, D]: part i of the stream, queries from cu_query[i] on, reads `keys` from cu_key[i] on. `keys` [S] are
# places in the stream; `readers` [S] are the places in `keys` in the order of the tokens that stand there,
# those of token t up to `reader_ends`[t + 1]. `longest`, on the host, is the most keys that a part has: a
# tensor, because layers would be compiled again for each value of a number.
attend = packed_operator(
    "prefix_attention", _forward, _backward, lambda query, *_: (query.shape[0] * query.shape[1],)
)


def readers_of(keys: Tensor, tokens: int) -> Readers:
    """Build the readers on the device of `keys`, without waiting for a GPU."""
    in_order, readers = keys.sort(stable=True)
    ends = torch.searchsorted(in_order, torch.arange(tokens + 1, device=keys.device))
    return Readers(readers.int(), ends.int())


def _for_each_head(stream: Tensor, heads: int) -> Tensor:
    """Expand [T, G, D] to [T, H, D]: a key head is repeated for each query head that reads it."""
    tokens, groups, width = stream.shape
    if groups == heads:
        return stream
    return stream[:, :, None].expand(tokens, groups, heads // groups, width).reshape(tokens, heads, width)


def collect(wide: Tensor, readers: Tensor, reader_ends: Tensor, groups: int) -> Tensor:
    """[T, G, D] from gradients of copies [S, H, D]: sums over each token's readers and each group's heads."""
    if wide.is_cuda:
        from slime.backends.attention import prefix_kernels  # Triton, which CPU machines need not have

        return prefix_kernels.collect(wide, readers, reader_ends, groups)
    copies, heads, width = wide.shape
    narrow = wide.view(copies, groups, heads // groups, width).float().sum(2)
    tokens = torch.repeat_interleave(torch.arange(len(reader_ends) - 1), reader_ends.diff())
    out = narrow.new_zeros(len(reader_ends) - 1, groups, width)
    return out.index_add_(0, tokens, narrow[readers.long()]).to(wide.dtype)
