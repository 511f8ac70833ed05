"""The Triton kernel that adds a 16-bit gradient to its fp32 sum; imported only on CUDA machines.

torch's own kernel reads one number at a time if the types differ, and reaches half of the memory bandwidth.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _add(  # type: ignore[no-untyped-def]  # Triton reads annotations, and pointers have none
    total, part, size, distance, EMPTY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    sums, added = total + row * distance + place, part + row * size + place
    value = tl.load(added, mask=inside).to(tl.float32)
    if not EMPTY:
        value += tl.load(sums, mask=inside)
    tl.store(sums, value, mask=inside)


def add_(total: Tensor, part: Tensor, *, empty: bool = False) -> None:
    """Add `part` to `total`, of one shape and both contiguous. `empty`: `total` is zero, and is not read."""
    add_rows_(total.view(1, -1), part, empty=empty)


def add_rows_(total: Tensor, part: Tensor, *, empty: bool = False) -> None:
    """Add `part` (contiguous) to `total`, which may have any stride in its first dimension. `empty` as in
    `add_`.
    """
    rows, size = len(total), total[0].numel()
    grid = (triton.cdiv(size, _BLOCK), rows)
    _add[grid](total, part, size, total.stride(0), EMPTY=empty, BLOCK=_BLOCK, num_warps=8)
