"""Triton kernels that scale and transpose the rows of experts in FP8; imported only on CUDA machines.

Rows are scaled as `slime.backends.fp8.scaling.by_rows` does it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.backends.fp8.scaling import FP8

_TILE = 128


@triton.jit
def size_of(values):  # type: ignore[no-untyped-def]  # Triton reads annotations, and pointers have none
    """Return the bits of absolute values: compared as integers, NaN is the largest."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def factors_of(largest):  # type: ignore[no-untyped-def]  # as above
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    factor = tl.where(largest < 0x7F800000, factor, float("nan"))
    return factor, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]  # as above
    source, values, factors, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    size = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        read = tl.load(source + row * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        size = tl.maximum(size, size_of(read.to(tl.float32)))
    factor, inverse = factors_of(tl.max(size, axis=0))
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        read = tl.load(source + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(values + row * WIDTH + columns, (read * inverse).to(values.dtype.element_ty), mask=inside)
    tl.store(factors + row, factor)


@triton.jit
def _transpose(  # type: ignore[no-untyped-def]  # as above
    values, shares, index, out, rows, width, PICKED: tl.constexpr, TILE: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < rows
    row = tl.load(index + place, mask=inside, other=-1).to(tl.int64) if PICKED else place
    share = tl.load(shares + place, mask=inside, other=0.0)
    known = (inside & (row >= 0))[:, None] & (column < width)[None, :]
    tile = tl.load(values + row[:, None] * width + column[None, :], mask=known, other=0.0)
    tile = (tile.to(tl.float32) * share[:, None]).to(out.dtype.element_ty)
    there = (column < width)[:, None] & inside[None, :]
    tl.store(out + column[:, None] * rows + place[None, :], tl.trans(tile), mask=there)


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[R, W] -> FP8 values and their factors [R, 1]."""
    rows, width = matrix.shape
    values, factors = torch.empty_like(matrix, dtype=FP8), matrix.new_empty(rows, 1, dtype=torch.float32)
    block = min(2048, triton.next_power_of_2(width))
    _quantize[(rows,)](matrix, values, factors, WIDTH=width, BLOCK=block, num_warps=4)
    return values, factors


def transpose(values: Tensor, shares: Tensor, index: Tensor | None) -> Tensor:
    """[W, P]: the transpose of values [R, W] at `index` [P] times shares [P]; index -1 is a row of zeros."""
    rows, width = len(shares), values.shape[1]
    out = torch.empty(width, rows, dtype=values.dtype, device=values.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(width, _TILE))
    picked = index is not None
    _transpose[grid](
        values, shares, index if picked else shares, out, rows, width, PICKED=picked, TILE=_TILE, num_warps=4
    )
    return out
