"""Triton kernels of decoding; imported only on CUDA machines.

Attention: one program computes all query heads that share a key head, for one sequence and one part of its
keys. Where few sequences run, their keys are split into parts so that the device is full, and a second kernel
adds them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEYS_AT_ONCE = 64
_PROGRAMS = 256  # enough to fill a device
_MAX_PARTS = 16


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # Triton reads annotations, and pointers have none
    query, keys, values, table, lengths, out, partial, peaks, sums, scale, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    per_part = tl.cdiv(tl.cdiv(length, PARTS), COLUMNS) * COLUMNS
    begin, end = part * per_part, tl.minimum((part + 1) * per_part, length)
    shared: tl.constexpr = HEADS // KV_HEADS
    member = tl.arange(0, GROUP)
    head = kv_head * shared + member
    inside = member < shared
    width, value_width = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    q = tl.load(
        query + (row * HEADS + head)[:, None] * KEY_DIM + width[None, :],
        mask=inside[:, None] & (width < KEY_DIM)[None, :],
        other=0.0,
    )
    peak = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, VALUE_BLOCK), tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        exists = column < end
        page = tl.load(table + row * table_stride + column // PAGE, mask=exists, other=0).to(tl.int64)
        place = (page * PAGE + column % PAGE) * KV_HEADS + kv_head
        k = tl.load(
            keys + place[None, :] * KEY_DIM + width[:, None],
            mask=exists[None, :] & (width < KEY_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = tl.where(exists[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(peak - higher)
        v = tl.load(
            values + place[:, None] * VALUE_DIM + value_width[None, :],
            mask=exists[:, None] & (value_width < VALUE_DIM)[None, :],
            other=0.0,
        )
        mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * faded + tl.sum(weights, 1)
        peak = higher
    kept = inside[:, None] & (value_width < VALUE_DIM)[None, :]
    if PARTS == 1:
        place = (row * HEADS + head)[:, None] * VALUE_DIM + value_width[None, :]
        tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=kept)
    else:
        where = (row * HEADS + head) * PARTS + part
        tl.store(partial + where[:, None] * VALUE_DIM + value_width[None, :], mixed, mask=kept)
        tl.store(peaks + where, peak, mask=inside)
        tl.store(sums + where, total, mask=inside)


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]  # as above
    partial, peaks, sums, out, PARTS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # one head of one sequence
    part, width = tl.arange(0, PARTS), tl.arange(0, VALUE_BLOCK)
    peak = tl.load(peaks + row * PARTS + part)
    share = tl.exp(peak - tl.max(peak, 0))  # 0 for parts without keys: their peak is -inf
    total = tl.sum(share * tl.load(sums + row * PARTS + part), 0)
    mixed = tl.load(
        partial + (row * PARTS + part)[:, None] * VALUE_DIM + width[None, :],
        mask=(width < VALUE_DIM)[None, :],
        other=0.0,
    )
    value = tl.sum(mixed * share[:, None], 0) / total
    tl.store(out + row * VALUE_DIM + width, value.to(out.dtype.element_ty), mask=width < VALUE_DIM)


def paged_decode(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, page: int, scale: float
) -> Tensor:
    """Compute what `attention.attend_to_copies` does, without copies; lengths are at least 1."""
    query = query.contiguous()
    (count, heads, key_dim), kv_heads, value_dim = query.shape, keys.shape[1], values.shape[2]
    parts = min(_MAX_PARTS, triton.next_power_of_2(max(1, _PROGRAMS // (count * kv_heads))))
    out = query.new_empty(count, heads, value_dim)
    split = parts > 1
    rows = (count * heads * parts,) if split else (0,)
    partial = out.new_empty(*rows, value_dim, dtype=torch.float32)
    peaks, sums = (out.new_empty(rows, dtype=torch.float32) for _ in range(2))
    value_block = triton.next_power_of_2(value_dim)
    _attend[(count, kv_heads, parts)](
        query, keys, values, table, lengths, out, partial, peaks, sums, scale, table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        GROUP=max(16, triton.next_power_of_2(heads // kv_heads)),
        KEY_BLOCK=max(16, triton.next_power_of_2(key_dim)), VALUE_BLOCK=max(16, value_block),
        PAGE=page, PARTS=parts, COLUMNS=_KEYS_AT_ONCE,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2,
    )  # fmt: skip
    if split:
        _add_parts[(count * heads,)](
            partial, peaks, sums, out, PARTS=parts, VALUE_DIM=value_dim, VALUE_BLOCK=value_block
        )
    return out


@triton.jit
def _norm(  # type: ignore[no-untyped-def]  # as above
    hidden, weight, out, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(hidden + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
    # Rounded before the weight is applied, as models of transformers do.
    scaled = scaled.to(out.dtype.element_ty) * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    hidden, width = hidden.contiguous(), hidden.shape[-1]
    out = torch.empty_like(hidden)
    rows = hidden.numel() // width
    _norm[(rows,)](hidden, weight, out, epsilon, WIDTH=width, BLOCK=triton.next_power_of_2(width))
    return out
