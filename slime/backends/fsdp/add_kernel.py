"""The Triton kernel that adds a 16-bit gradient to its fp32 sum; imported only on CUDA machines.

torch's own reads and writes one number at a time where the types differ: half of what memory allows.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _add(total, part, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # pointers have no type
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    added = tl.load(total + place, mask=inside) + tl.load(part + place, mask=inside).to(tl.float32)
    tl.store(total + place, added, mask=inside)


def add_(total: Tensor, part: Tensor) -> None:
    """total += part, of one shape and both contiguous."""
    _add[(triton.cdiv(total.numel(), _BLOCK),)](total, part, total.numel(), BLOCK=_BLOCK, num_warps=8)
