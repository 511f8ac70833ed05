"""The Triton kernel that writes a weight as FP8 blocks in one pass; imported only on CUDA machines."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_ROWS_X_COLUMNS = 128 * 128  # of a block that one program keeps in registers
_WARPS = 8


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]  # Triton reads annotations, and pointers have none
    weight, out, scales, rows, columns, stride, tiles, tiny, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(weight + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
    values = values.to(tl.float32)
    # Triton's maximum does not keep NaN in every version, so NaN is checked separately.
    largest = tl.max(tl.abs(values))
    broken = tl.max((values != values).to(tl.int32)) > 0
    scale = tl.maximum(tl.div_rn(largest, tl.full((), 448.0, tl.float32)), tiny)
    scale = tl.where(largest == 0, 1.0, scale)
    scale = tl.where(broken, float("nan"), scale)
    tl.store(scales + tl.program_id(0) * tiles + tl.program_id(1), scale)
    values = tl.div_rn(values, tl.broadcast_to(scale, (ROWS, COLUMNS)))
    values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    place = out + row[:, None] * columns + column[None, :]
    tl.store(place, values.to(out.dtype.element_ty), mask=inside)


def quantize(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Quantize a weight bit for bit like `quantize_blocks` with nearest values and factors of any size.

    The rows of the weight may have gaps between them.
    """
    rows, columns = weight.shape
    tiles = (triton.cdiv(rows, block[0]), triton.cdiv(columns, block[1]))
    out = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(tiles, dtype=torch.float32, device=weight.device)
    _quantize[tiles](
        weight,
        out,
        scales,
        rows,
        columns,
        weight.stride(0),
        tiles[1],
        torch.finfo(torch.float32).tiny,
        ROWS=block[0],
        COLUMNS=block[1],
        num_warps=_WARPS,
    )
    return out, scales


def can_quantize(weight: Tensor, block: tuple[int, int]) -> bool:
    """Return whether the kernel supports the weight: block sizes are powers of two, rows have no gaps."""
    power_of_two = all(size & (size - 1) == 0 for size in block)
    return power_of_two and block[0] * block[1] <= LARGEST_ROWS_X_COLUMNS and weight.stride(1) == 1
