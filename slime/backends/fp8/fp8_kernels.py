"""Triton kernels that scale matrices in FP8 and transpose them; imported only on CUDA machines."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _WARPS = 128, 128, 4
_LARGEST_BLOCK = 2048


@triton.jit
def _turn(  # type: ignore[no-untyped-def]  # Triton reads annotations, and pointers have none
    values, shares, index, out, rows, columns, out_rows,
    PICKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.load(shares + place, mask=place < rows, other=0.0)
    row = tl.load(index + place, mask=place < rows, other=-1).to(tl.int64) if PICKED else place
    inside = ((place < rows) & (row >= 0))[:, None] & (column < columns)[None, :]
    tile = tl.load(values + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tile = (tile.to(tl.float32) * share[:, None]).to(out.dtype.element_ty)
    there = (column < columns)[:, None] & (place < out_rows)[None, :]
    tl.store(out + column[:, None] * out_rows + place[None, :], tl.trans(tile), mask=there)


# Compiled layers launch the kernel themselves: a call of an operator of Python's would take the host longer
# than the kernel takes the device.
@torch.library.triton_op("slime::fp8_turn", mutates_args={})
def turn(values: Tensor, shares: Tensor, index: Tensor | None, out_rows: int) -> Tensor:
    """Return [K, out_rows], the transpose of values[index] * shares [M, 1], padded with zeros.

    Index -1 is a row of zeros; without an index the rows are those of `values`.
    """
    rows, columns = shares.shape[0], values.shape[1]
    out = torch.empty((columns, out_rows), dtype=values.dtype, device=values.device)
    grid = ((out_rows + _ROWS - 1) // _ROWS, (columns + _COLUMNS - 1) // _COLUMNS)
    places = shares if index is None else index
    torch.library.wrap_triton(_turn)[grid](
        values, shares, places, out, rows, columns, out_rows, PICKED=index is not None, ROWS=_ROWS,
        COLUMNS=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def size_of(values):  # type: ignore[no-untyped-def]  # as above
    """Return the bits of absolute values: compared as integers, NaN is the largest."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def factors_of(largest):  # type: ignore[no-untyped-def]  # as above
    """Return factor and inverse of a row, as `slime.backends.fp8.scaling.by_rows` computes them."""
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    factor = tl.where(largest < 0x7F800000, factor, float("nan"))
    return factor, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale(  # type: ignore[no-untyped-def]  # as above
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


def by_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] -> e4m3 values and their factors [M, 1]."""
    rows, width = matrix.shape
    values = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    factors = matrix.new_empty(rows, 1, dtype=torch.float32)
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(width))
    _scale[(rows,)](matrix, values, factors, WIDTH=width, BLOCK=block, num_warps=_WARPS)
    return values, factors
