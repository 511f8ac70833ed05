"""The Triton kernel that transposes FP8 matrices; imported only on CUDA machines."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _WARPS = 128, 128, 4


@triton.jit
def _turn(  # type: ignore[no-untyped-def]  # Triton reads annotations, and pointers have none
    values, shares, out, rows, columns, out_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.load(shares + row, mask=row < rows, other=0.0)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(values + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tile = (tile.to(tl.float32) * share[:, None]).to(out.dtype.element_ty)
    there = (column < columns)[:, None] & (row < out_rows)[None, :]
    tl.store(out + column[:, None] * out_rows + row[None, :], tl.trans(tile), mask=there)


# Compiled layers launch the kernel themselves: a call of an operator of Python's would take the host longer
# than the kernel takes the device.
@torch.library.triton_op("slime::fp8_turn", mutates_args={})
def turn(values: Tensor, shares: Tensor, out_rows: int) -> Tensor:
    """Return [K, out_rows] from [M, K]: the transpose of values * shares [M, 1], padded with zeros."""
    rows, columns = values.shape
    out = torch.empty((columns, out_rows), dtype=values.dtype, device=values.device)
    grid = ((out_rows + _ROWS - 1) // _ROWS, (columns + _COLUMNS - 1) // _COLUMNS)
    torch.library.wrap_triton(_turn)[grid](
        values, shares, out, rows, columns, out_rows, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS
    )
    return out
