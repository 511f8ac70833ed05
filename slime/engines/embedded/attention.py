"""Attention over a paged KV pool, registered with transformers so that any model class can run on it.

One forward pass is one packed row of tokens: first one token of each decoding sequence, then the prompt
chunks. No mask over the whole row ever exists: each group of sequences attends to its own pages only.

Sliding windows, chunks, sinks and soft caps are computed with masks, which is slower than plain attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime.algorithms.attention_variants import PLAIN, Variant, masked_attention, sees, variant_of
from slime.engines.embedded.request_images import ImageRows
from slime.engines.embedded.row_spans import SpanGroup

NAME = "slime_paged"


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Tokens `start..start+count` of the row: the newest token of `count` sequences.

    `in_place`: a kernel reads keys in their pages; else they are copied, padded to the longest sequence.
    """

    start: int
    count: int
    table: Tensor  # [count, W] int32 pages of each sequence; entries after its length are unused
    lengths: Tensor  # [count] int32 tokens whose keys are in the pool, the newest included
    in_place: bool


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """`count` prompt chunks of `num_new` tokens each, that follow `num_cached` tokens already in the pool."""

    start: int
    count: int
    num_new: int
    num_cached: int
    # [count * (num_cached + num_new)] pool rows; None: no cached part, keys are in the row.
    rows: Tensor | None
    mask: Tensor | None  # [num_new, num_cached + num_new] additive; None as above


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Everything one forward pass needs, apart from the weights. T tokens, of which N give logits."""

    token_ids: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    write_rows: Tensor  # [T] pool row that takes the key and value of each token
    logit_index: Tensor  # [N]
    decode: tuple[DecodeGroup | SpanGroup, ...]
    prefill: tuple[PrefillGroup, ...]
    grid: Tensor | None = None  # [3, 1, T] positions of families with grids; None: `positions`
    images: tuple[ImageRows, ...] = ()  # in the order of their rows

    @property
    def only_decodes(self) -> bool:
        return len(self.decode) == 1 and not self.prefill


@dataclass(frozen=True, slots=True)
class KVShape:
    """Cache entry of a token in one layer: `heads` keys and values of these widths."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


class ShapeProbe:
    """Replaces the pool during one pass, to record the shape of each layer's keys and values."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}  # by layer
        self.plain = True  # no layer has a window, chunks, sinks or a soft cap
        self.repeats = False  # a layer attends several times, each with keys of its own


class KVPool:
    """Keys and values of all layers, in pages: `[num_blocks * block_size, kv_heads, head_dim]` each."""

    def __init__(
        self,
        shapes: dict[int, KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_size = block_size
        rows = num_blocks * block_size
        # Zeroed, because masked garbage would spoil a row through 0 * NaN, and so that a lack of memory fails
        # now.
        self.keys, self.values = (
            {
                layer: torch.empty((rows, shape.heads, width(shape)), dtype=dtype, device=device).zero_()
                for layer, shape in shapes.items()
            }
            for width in (lambda shape: shape.key_dim, lambda shape: shape.value_dim)
        )

    def wipe(self) -> None:
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor.zero_()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys.values(), *self.values.values()))


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    plan: BatchPlan | None,
    pool: KVPool | ShapeProbe,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers: query `[1, H, T, D]`, key and value `[1, H_kv, T, D]` -> `[1, T, H, D]`."""
    variant = variant_of(module, attention_mask, kwargs)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, heads, D]
    if isinstance(pool, ShapeProbe):
        pool.repeats |= module.layer_idx in pool.shapes
        pool.shapes[module.layer_idx] = KVShape(k.shape[1], k.shape[2], v.shape[2])
        pool.plain &= variant is PLAIN
        return v.new_zeros(1, *q.shape[:2], v.shape[2]), None
    assert plan is not None, "only a probe has no plan"
    keys, values = pool.keys[module.layer_idx], pool.values[module.layer_idx]
    keys.index_copy_(0, plan.write_rows, k)
    values.index_copy_(0, plan.write_rows, v)
    parts = [_decode(g, q, keys, values, pool.block_size, scaling, variant) for g in plan.decode]
    parts += [_prefill(g, q, k, v, keys, values, scaling, variant) for g in plan.prefill]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.unsqueeze(0), None


def _decode(
    group: DecodeGroup | SpanGroup,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_size: int,
    scaling: float | None,
    variant: Variant,
) -> Tensor:
    if isinstance(group, SpanGroup):
        return group.attend(q, keys, values, scaling)
    query = q[group.start : group.start + group.count]
    if group.in_place and query.is_cuda:
        from slime.engines.embedded.decode_kernels import paged_decode  # late: needs Triton

        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return paged_decode(query, keys, values, group.table, group.lengths, block_size, scale)
    return attend_to_copies(query, keys, values, group.table, group.lengths, block_size, scaling, variant)


def attend_to_copies(
    query: Tensor,  # [B, H, D]
    keys: Tensor,  # [rows of the pool, H_kv, D]
    values: Tensor,  # [rows of the pool, H_kv, V]
    table: Tensor,
    lengths: Tensor,
    block_size: int,
    scale: float | None,
    variant: Variant = PLAIN,
) -> Tensor:
    """Compute attention of one new token per sequence to copies of its keys; the result is [B, H, V]."""
    count, kv_heads = len(query), keys.shape[1]
    column = torch.arange(table.shape[1] * block_size, device=query.device)
    seen = column < lengths[:, None]
    pages = torch.where(seen[:, ::block_size], table, 0).flatten()
    k, v = (
        pool.view(-1, block_size * kv_heads * pool.shape[2])
        .index_select(0, pages)
        .view(count, -1, kv_heads, pool.shape[2])
        .transpose(1, 2)
        for pool in (keys, values)
    )
    if variant is PLAIN:
        # Query heads that share a key head take the place of query positions in the kernel: they share a
        # mask, too.
        q = query.reshape(count, kv_heads, -1, query.shape[2])
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], scale=scale)
    else:
        position = lengths[:, None] - 1
        if variant.window is not None:
            seen &= column > position - variant.window
        if variant.chunk is not None:
            seen &= column // variant.chunk == position // variant.chunk
        k, v = (x.repeat_interleave(query.shape[1] // kv_heads, dim=1) for x in (k, v))
        out = masked_attention(query[:, :, None], k, v, seen[:, None, None], scale, variant)
    return out.reshape(count, -1, values.shape[2])


def _prefill(
    group: PrefillGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    variant: Variant,
) -> Tensor:
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
    if variant is PLAIN:
        causal = group.rows is None
        out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=causal, scale=scaling)
    else:
        seen = sees(group.num_new, k.shape[2], variant, q.device)
        out = masked_attention(q, k, v, seen, scaling, variant)
    return out.transpose(1, 2).flatten(0, 1)


def register() -> None:
    """Make `attn_implementation="slime_paged"` known; transformers builds no mask for it."""
    from transformers import AttentionInterface  # late: transformers takes seconds to import

    AttentionInterface.register(NAME, paged_attention)
