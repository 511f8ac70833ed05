"""Kernels for attention in which a part of a stream has more keys than queries, forward and backward.

FlashAttention-4 is used if it is installed and agrees with torch's own kernel on this device; else torch's.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime.backends.attention import flash4
from slime.backends.attention.trial import why_apart

logger = logging.getLogger(__name__)
_aten = torch.ops.aten

# Queries and keys of the parts of a trial, short ones and long ones.
_PARTS = ((300, 300), (40, 1100), (1, 24), (130, 131))


class Bounds(NamedTuple):
    """Part i has the queries from `cu_query`[i] on and the keys from `cu_key`[i] on, at most `longest`."""

    cu_query: Tensor
    cu_key: Tensor
    longest: int


class Passes(NamedTuple):
    """Kernels of one package. Sums [H, T] go from one pass to the other."""

    forward: Callable[[Tensor, Tensor, Tensor, Bounds, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _torch_forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float
) -> tuple[Tensor, Tensor]:
    cu_query, cu_key, longest = bounds
    out, sums, *_ = _aten._flash_attention_forward(
        query.contiguous(), key, value, cu_query, cu_key, longest, longest, 0.0, True, False, scale=scale
    )
    return out, sums


def _torch_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Bounds,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.zeros((), dtype=torch.int64, device=query.device)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    cu_query, cu_key, longest = bounds
    grads: tuple[Tensor, Tensor, Tensor] = _aten._flash_attention_backward(
        grad.contiguous(), query.contiguous(), key, value, out, sums, cu_query, cu_key, longest, longest,
        0.0, True, no_dropout, unused, scale=scale,
    )  # fmt: skip
    return grads


def _named(bounds: Bounds) -> dict[str, Any]:
    return dict(
        cu_seqlens_q=bounds.cu_query, cu_seqlens_k=bounds.cu_key,
        max_seqlen_q=bounds.longest, max_seqlen_k=bounds.longest,
    )  # fmt: skip


TORCH = Passes(_torch_forward, _torch_backward)
FLASH4 = Passes(
    lambda query, key, value, bounds, scale: flash4.forward(query, key, value, scale, **_named(bounds)),
    lambda grad, query, key, value, out, sums, bounds, scale: flash4.backward(
        grad, query, key, value, out, sums, scale, **_named(bounds)
    ),
)


@functools.cache
def passes_for(heads: int, groups: int, width: int, dtype: torch.dtype, device: torch.device) -> Passes:
    """Return the kernels for `heads` of queries and `groups` of keys; they are tested on first use."""
    reason = why_not(FLASH4, TORCH, heads, groups, width, dtype, device)
    if reason:
        logger.warning("Shared prefixes: FlashAttention-4 is not used, because %s", reason)
    return TORCH if reason is not None else FLASH4


def why_not(
    ours: Passes, known: Passes, heads: int, groups: int, width: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why `ours` cannot replace `known`; None: both agree; empty: its package is not installed."""
    shape = heads, groups, width, dtype, device
    return why_apart(lambda: _try(ours, *shape), lambda: _try(known, *shape))


def _try(
    passes: Passes, heads: int, groups: int, width: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    (queries, keys), longest = zip(*_PARTS, strict=True), max(key for _, key in _PARTS)
    cu_query, cu_key = (
        torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32) for sizes in (queries, keys)
    )
    bounds = Bounds(cu_query, cu_key, longest)
    shapes = [(sum(queries), heads), (sum(keys), groups), (sum(keys), groups), (sum(queries), heads)]
    query, key, value, grad = (
        torch.randn(*shape, width, generator=generator).to(device, dtype) for shape in shapes
    )
    scale = 1.5 * width**-0.5  # an unusual scale: kernels that ignore it must be detected
    out, sums = passes.forward(query, key, value, bounds, scale)
    wide_key, wide_value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
    return [out, *passes.backward(grad, query, wide_key, wide_value, out, sums, bounds, scale)]
