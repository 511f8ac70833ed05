"""Attention over a paged KV pool, registered with transformers so that any model class can run on it.

One forward pass is one packed row of tokens: first one token of each decoding sequence, then the prompt
chunks. No mask over the whole row ever exists: each group of sequences attends to its own pages only.

Sliding windows, chunks, sinks and soft caps are computed with masks: right, and slower than plain attention.
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
    """Tokens `start..start+count` of the row: the newest token of `count` sequences of similar length."""

    start: int
    count: int
    blocks: Tensor  # [count * num_blocks] int64, every row padded with block 0
    mask: Tensor  # [count, 1, 1, num_blocks * block_size], 0 where a key exists and -inf elsewhere


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """A decode group of any lengths: keys are read where they lie, so nothing is padded or copied."""

    start: int
    count: int
    table: Tensor  # [count, W] int32 pages of each sequence; those behind its length mean nothing
    lengths: Tensor  # [count] int32, the newest token included


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
    decode: tuple[DecodeGroup | PagedGroup | SpanGroup, ...]
    prefill: tuple[PrefillGroup, ...]
    grid: Tensor | None = None  # [3, 1, T] positions of families that have grids; None: `positions`
    images: tuple[ImageRows, ...] = ()  # in the order of their rows

    @property
    def only_decodes(self) -> bool:
        return len(self.decode) == 1 and not self.prefill


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer keeps of a token: `heads` keys and values of these widths."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


class ShapeProbe:
    """Stands in for a pool during one pass, which tells the shape of each layer's keys and values."""

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
        # Zeroed by hand: masked garbage would still poison a row through 0 * NaN; and what does not fit fails
        # now, not later.
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
    assert plan is not None, "only a probe comes without a plan"
    keys, values = pool.keys[module.layer_idx], pool.values[module.layer_idx]
    keys.index_copy_(0, plan.write_rows, k)
    values.index_copy_(0, plan.write_rows, v)
    parts = [_decode(g, q, keys, values, pool.block_size, scaling, plan, variant) for g in plan.decode]
    parts += [_prefill(g, q, k, v, keys, values, scaling, variant) for g in plan.prefill]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.unsqueeze(0), None


def _decode(
    group: DecodeGroup | PagedGroup | SpanGroup,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_size: int,
    scaling: float | None,
    plan: BatchPlan,
    variant: Variant,
) -> Tensor:
    if isinstance(group, SpanGroup):
        return group.attend(q, keys, values, scaling)
    rows, kv_heads = slice(group.start, group.start + group.count), keys.shape[1]
    if isinstance(group, PagedGroup):
        where = group.table, group.lengths
        return attend_to_pages(q[rows], keys, values, *where, block_size=block_size, scale=scaling)
    k, v = (
        pool.view(-1, block_size * kv_heads * pool.shape[2])
        .index_select(0, group.blocks)
        .view(group.count, -1, kv_heads, pool.shape[2])
        .transpose(1, 2)
        for pool in (keys, values)
    )
    if variant is PLAIN:
        # The query heads that share a key head stand where a kernel expects
        # query positions: they share a mask too.
        q = q[rows].reshape(group.count, kv_heads, -1, keys.shape[2])
        out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
    else:
        position = plan.positions[0, rows, None]
        column = torch.arange(k.shape[2], device=k.device)
        seen = group.mask[:, 0, 0] == 0
        if variant.window is not None:
            seen &= column > position - variant.window
        if variant.chunk is not None:
            seen &= column // variant.chunk == position // variant.chunk
        k, v = (x.repeat_interleave(q.shape[1] // kv_heads, dim=1) for x in (k, v))
        out = masked_attention(q[rows, :, None], k, v, seen[:, None, None], scaling, variant)
    return out.reshape(group.count, -1, values.shape[2])


def attend_to_pages(
    query: Tensor,  # [B, H, D]
    keys: Tensor,  # [rows of the pool, H_kv, D]
    values: Tensor,  # [rows of the pool, H_kv, V]
    table: Tensor,  # [B, W] int32 pages of each sequence; what lies behind its length means nothing
    lengths: Tensor,  # [B] int32 tokens whose keys are in the pool, the newest included
    *,
    block_size: int,
    scale: float | None,
) -> Tensor:
    """Attention of one new token per sequence to the pages of its keys; the result is [B, H, V]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.device.type == "cuda":
        from slime.engines.embedded.decode_kernels import paged_decode  # late: needs Triton

        return paged_decode(query, keys, values, table, lengths, block_size, scale)
    return _from_copies(query, keys, values, table, lengths, block_size, scale)


def _from_copies(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, page: int, scale: float
) -> Tensor:
    count, heads = len(query), keys.shape[1]
    column = torch.arange(table.shape[1] * page, device=query.device)
    seen = column[None, :] < lengths[:, None]
    pages = torch.where(seen[:, ::page], table, 0).long()
    rows = (pages[:, :, None] * page + column[:page]).view(count, -1)
    k, v = (pool[rows].transpose(1, 2) for pool in (keys, values))
    q = query.reshape(count, heads, -1, query.shape[2])
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :], scale=scale)
    return out.reshape(count, query.shape[1], values.shape[2])


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
