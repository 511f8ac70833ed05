"""Attention of short documents on a CPU, by plain matrix products with a backward pass of their own.

For rows of a dozen scores, torch's softmax takes longer than everything else in this module. Computing it by
operations over the whole batch of scores takes a fifth of the time. It uses powers of 2, because exp2 of
minus infinity is ten times as fast as exp on a CPU.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor

_SHORT_ROW = 96  # scores, up to which torch's softmax is the slower one


def _by_key_head(query: Tensor, groups: int) -> Tensor:
    """[B x G, L x H / G, D] of [B, L, H, D]: all query heads of a key head are rows of one product."""
    batch, length, heads, width = query.shape
    rows = query.view(batch, length, groups, heads // groups, width).transpose(1, 2)
    return rows.reshape(batch * groups, -1, width)


def _by_query(rows: Tensor, batch: int, groups: int, length: int) -> Tensor:
    """Undo `_by_key_head`: returns [B, L, H, D]."""
    width = rows.shape[-1]
    return rows.view(batch, groups, length, -1, width).transpose(1, 2).reshape(batch, length, -1, width)


def shares_of(rows: Tensor, keys: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax of scaled products, with the mask added."""
    keys = keys.transpose(1, 2).contiguous()  # many small matrices are read faster as they lie in memory
    if keys.shape[-1] > _SHORT_ROW:
        return torch.baddbmm(mask, rows, keys, alpha=scale).softmax(-1)
    scores = torch.baddbmm(mask, rows, keys, alpha=scale / math.log(2.0))
    scores.sub_(scores.amax(-1, keepdim=True)).exp2_()
    return scores.div_(scores.sum(-1, keepdim=True))


def gradients(
    given: Tensor, rows: Tensor, keys: Tensor, values: Tensor, shares: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of rows, keys and values; `given` is the gradient of the result."""
    grad_values = torch.bmm(shares.transpose(1, 2), given)
    slopes = torch.bmm(given, values.transpose(1, 2).contiguous()).mul_(shares)
    slopes.addcmul_(shares, slopes.sum(-1, keepdim=True), value=-1).mul_(scale)
    return torch.bmm(slopes, keys), torch.bmm(slopes.transpose(1, 2), rows), grad_values


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        batch, length = query.shape[:2]
        groups = key.shape[2]
        rows = _by_key_head(query, groups)
        keys, values = (x.transpose(1, 2).reshape(batch * groups, x.shape[1], -1) for x in (key, value))
        shares = shares_of(rows, keys, mask, scale)
        ctx.save_for_backward(rows, keys, values, shares)
        ctx.scale, ctx.shape = scale, (batch, groups, length)
        return _by_query(torch.bmm(shares, values), batch, groups, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, keys, values, shares = ctx.saved_tensors
        batch, groups, length = ctx.shape
        given = _by_key_head(grad.contiguous(), groups)
        grad_rows, grad_keys, grad_values = gradients(given, rows, keys, values, shares, ctx.scale)
        by_head = (x.view(batch, groups, *x.shape[1:]).transpose(1, 2) for x in (grad_keys, grad_values))
        return _by_query(grad_rows, batch, groups, length), *by_head, None, None


def attend_with_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[B, L, H, D] of [B, L, H, D] and [B, K, G, D].

    `mask`, for [B x G, L x H / G, K], is 0 where a key is seen and minus infinity elsewhere.
    """
    return cast(Tensor, _Attention.apply(query, key, value, mask, scale))
