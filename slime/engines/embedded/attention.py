"""Attention over a paged KV pool, registered with transformers so that any model class can run on it.

One forward pass is one packed row of tokens: first one token of each decoding sequence, then the prompt
chunks. No mask over the whole row ever exists: each group of sequences attends to its own pages only.

Not covered: sliding windows, attention sinks, soft caps. They raise by name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "slime_paged"


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Tokens `start..start+count` of the row: the newest token of `count` sequences of similar length."""

    start: int
    count: int
    blocks: torch.Tensor  # [count * num_blocks] int64, every row padded with block 0
    mask: torch.Tensor  # [count, 1, 1, num_blocks * block_size], 0 where a key exists and -inf elsewhere


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """`count` prompt chunks of `num_new` tokens each, that follow `num_cached` tokens already in the pool."""

    start: int
    count: int
    num_new: int
    num_cached: int
    rows: (
        torch.Tensor | None
    )  # [count * (num_cached + num_new)] pool rows; None: no cached part, keys are in the row
    mask: torch.Tensor | None  # [num_new, num_cached + num_new] additive; None as above


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Everything one forward pass needs, apart from the weights. T tokens, of which N give logits."""

    token_ids: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    write_rows: torch.Tensor  # [T] pool row that takes the key and value of each token
    logit_index: torch.Tensor  # [N]
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillGroup, ...]


class KVPool:
    """Keys and values of all layers, in pages: `[num_blocks * block_size, kv_heads, head_dim]` each."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_size = block_size
        shape = (num_blocks * block_size, kv_heads, head_dim)
        # Zeroed by hand: masked garbage would still poison a row through 0 * NaN; and what does not fit fails
        # now, not later.
        self.keys, self.values = (
            [torch.empty(shape, dtype=dtype, device=device).zero_() for _ in range(num_layers)]
            for _ in range(2)
        )

    def wipe(self) -> None:
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    plan: BatchPlan,
    pool: KVPool,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """For transformers: query `[1, H, T, D]`, key and value `[1, H_kv, T, D]` -> output `[1, T, H, D]`."""
    refused = [
        n for n in ("sliding_window", "s_aux", "softcap", "position_bias") if kwargs.get(n) is not None
    ]
    if refused:
        raise ValueError(
            f"the embedded engine does not support {refused[0]} attention ({type(module).__name__})"
        )
    keys, values = pool.keys[module.layer_idx], pool.values[module.layer_idx]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, heads, D]
    keys.index_copy_(0, plan.write_rows, k)
    values.index_copy_(0, plan.write_rows, v)
    parts = [_decode(g, q, keys, values, pool.block_size, scaling) for g in plan.decode]
    parts += [_prefill(g, q, k, v, keys, values, scaling) for g in plan.prefill]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.unsqueeze(0), None


def _decode(
    group: DecodeGroup,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_size: int,
    scaling: float | None,
) -> torch.Tensor:
    kv_heads, head_dim = keys.shape[1:]
    # The query heads that share a key head stand where a kernel expects
    # query positions: they share a mask too.
    q = q[group.start : group.start + group.count].reshape(group.count, kv_heads, -1, head_dim)
    k, v = (
        pool.view(-1, block_size * kv_heads * head_dim)
        .index_select(0, group.blocks)
        .view(group.count, -1, kv_heads, head_dim)
        .transpose(1, 2)
        for pool in (keys, values)
    )
    out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
    return out.reshape(group.count, -1, head_dim)


def _prefill(
    group: PrefillGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    stop = group.start + group.count * group.num_new
    q = q[group.start : stop].unflatten(0, (group.count, group.num_new)).transpose(1, 2)
    if group.rows is None:
        k, v = k[group.start : stop], v[group.start : stop]
    else:
        k, v = keys.index_select(0, group.rows), values.index_select(0, group.rows)
    repeats = q.shape[1] // k.shape[1]
    k, v = (
        x.unflatten(0, (group.count, -1)).transpose(1, 2).repeat_interleave(repeats, dim=1) for x in (k, v)
    )
    causal = group.rows is None
    out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=causal, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1)


def register() -> None:
    """Make `attn_implementation="slime_paged"` known; transformers builds no mask for it."""
    from transformers import AttentionInterface  # late: transformers takes seconds to import

    AttentionInterface.register(NAME, paged_attention)
