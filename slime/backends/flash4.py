"""Packed attention by FlashAttention-4, where the package `flash-attn-4` is installed: all documents in one call.

The fastest way on Hopper and Blackwell GPUs. Its public function hides the pass back inside autograd, which compiled layers
cannot look into, so the two functions below it are called here, in one opaque operator. They may change with a release:
`attention.prepare` tries the operator against plain attention before anything relies on it.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def _interface() -> ModuleType:
    from flash_attn.cute import interface  # optional, and slow to import

    return interface


def _documents(cu_seqlens: Tensor, bounds: Tensor) -> dict[str, Tensor | int]:
    longest = int(bounds.diff().max())
    return dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)


@torch.library.custom_op("slime::flash4_attention", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents: query [T, H, D], key and value [T, G, D] -> [T, H, D], and numbers for backward.

    `bounds` is `cu_seqlens` on the host, so that nothing waits for the device.
    """
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    options = _documents(cu_seqlens, bounds)
    out, sums, *_ = _interface()._flash_attn_fwd(
        query, key, value, softmax_scale=scale, causal=True, return_lse=True, **options
    )
    return out, sums


@attend.register_fake
def _(query, key, value, cu_seqlens, bounds, scale):
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("slime::flash4_attention_backward", mutates_args=())
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
    grad, query, key, value = (x.contiguous() for x in (grad, query, key, value))
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = _documents(cu_seqlens, bounds) | {"deterministic": deterministic}
    grads = _interface()._flash_attn_bwd(
        query, key, value, out, grad, sums, softmax_scale=scale, causal=True, **options
    )
    return grads[0], grads[1], grads[2]


@_backward.register_fake
def _(grad, query, key, value, out, sums, cu_seqlens, bounds, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _keep(ctx, inputs, output):
    query, key, value, cu_seqlens, bounds, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, bounds)


def _differentiate(ctx, grad, _grad_sums):
    query, key, value, out, sums, cu_seqlens, bounds = ctx.saved_tensors
    return *_backward(grad, query, key, value, out, sums, cu_seqlens, bounds, ctx.scale), None, None, None


attend.register_autograd(_differentiate, setup_context=_keep)
