"""Packed attention by FlashAttention-4, where `flash-attn-4` is installed: all documents in one call.

It is the fastest kernel on Hopper and Blackwell GPUs. Its public function hides the backward pass in
autograd, which torch.compile cannot trace, so the two internal functions are called here. They may change
with a release: `attention.prepare` tries the operator against plain attention before anything relies on it.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from slime.backends.attention.attention_operator import NotInstalled, packed_operator


@functools.cache
def _interface() -> Any:
    if importlib.util.find_spec("flash_attn") is None:
        raise NotInstalled("flash-attn-4")
    from flash_attn.cute import interface  # optional, and slow to import

    return interface


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, **lengths: Tensor | int
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and a sum [H, T] for each head and token; `lengths` by the package's names."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out, sums, *_ = _interface()._flash_attn_fwd(
        query, key, value, softmax_scale=scale, causal=True, return_lse=True, **lengths
    )
    return out, sums


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    scale: float,
    **lengths: Tensor | int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    grad, query, key, value = (x.contiguous() for x in (grad, query, key, value))
    grads = _interface()._flash_attn_bwd(
        query, key, value, out, grad, sums, softmax_scale=scale, causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(), **lengths,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


def _documents(cu_seqlens: Tensor, bounds: Tensor) -> dict[str, Tensor | int]:
    longest = int(bounds.diff().max())
    return dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return forward(query, key, value, scale, **_documents(cu_seqlens, bounds))


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return backward(grad, query, key, value, out, sums, scale, **_documents(cu_seqlens, bounds))


# One sum per head and token.
attend = packed_operator("flash4_attention", _forward, _backward, lambda query, *_: query.shape[1::-1])
