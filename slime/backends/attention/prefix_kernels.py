"""The Triton kernel that adds up gradients of keys that several parts read; imported only on CUDA."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _collect(  # type: ignore[no-untyped-def]  # Triton reads annotations, and pointers have none
    wide, readers, reader_ends, out,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TIMES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first, end = tl.load(reader_ends + token), tl.load(reader_ends + token + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    source = wide + (column // WIDTH) * (TIMES * WIDTH) + column % WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(first, end):
        row = tl.load(readers + number).to(tl.int64)
        for head in tl.static_range(TIMES):
            place = source + row * (SIZE * TIMES) + head * WIDTH
            total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=inside)


def collect(wide: Tensor, readers: Tensor, reader_ends: Tensor, groups: int) -> Tensor:
    """[T, G, D] from [S, H, D], added up in fp32."""
    _, heads, width = wide.shape
    tokens, size = len(reader_ends) - 1, groups * width
    out = wide.new_empty(tokens, groups, width)
    block = min(1024, triton.next_power_of_2(size))
    _collect[(tokens, triton.cdiv(size, block))](
        wide.contiguous(), readers, reader_ends, out,
        SIZE=size, WIDTH=width, TIMES=heads // groups, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
