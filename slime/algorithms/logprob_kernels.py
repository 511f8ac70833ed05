"""Triton kernels for a block of logits: each row's log-sum-exp, chosen logit and entropy, and the gradient.

Each is one pass over logits in the precision that the matrix product wrote, with fp32 arithmetic inside. Rows
are the tokens; columns are a part of the vocabulary or all of it. Imported only on CUDA machines (or under
Triton's interpreter).
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _row_statistics(  # type: ignore[no-untyped-def]  # Triton reads annotations, and pointers have none
    logits, targets, log_sums, chosen, entropy, stride, inverse_temperature,
    COLUMNS: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)  # sum of exp(x - top) * (x - top)
    for begin in range(0, COLUMNS, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        x = (
            tl.load(start + offsets, mask=offsets < COLUMNS, other=float("-inf")).to(tl.float32)
            * inverse_temperature
        )
        new_top = tl.maximum(top, tl.max(x, axis=0))
        # The first block moves the maximum from -inf, where the difference below would be NaN.
        shift = tl.where(top == float("-inf"), 0.0, top - new_top)
        keep = tl.where(top == float("-inf"), 0.0, tl.exp(shift))
        centred = x - new_top
        e = tl.exp(centred)
        if WITH_ENTROPY:
            weighted = keep * (weighted + shift * total) + tl.sum(tl.where(e > 0, e * centred, 0.0), axis=0)
        total = keep * total + tl.sum(e, axis=0)
        top = new_top
    log_total = tl.log(total)
    tl.store(log_sums + row, top + log_total)
    target = tl.load(targets + row)
    tl.store(chosen + row, tl.load(start + target).to(tl.float32) * inverse_temperature - top - log_total)
    if WITH_ENTROPY:
        tl.store(entropy + row, log_total - weighted / total)


@triton.jit
def _logit_gradient(  # type: ignore[no-untyped-def]  # as above
    logits, targets, log_sums, entropy, grad_chosen, grad_entropy, stride, columns, first,
    inverse_temperature, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    place = logits + row * stride + offsets
    log_prob = tl.load(place, mask=inside, other=0.0).to(tl.float32) * inverse_temperature - tl.load(
        log_sums + row
    )
    prob = tl.exp(log_prob)
    g = tl.load(grad_chosen + row)
    target = tl.load(targets + row) - first
    # d log p(target) / d logits = onehot - p;  d H / d logits = -p (log p + H)
    grad = tl.where(offsets == target, g, 0.0) - g * prob
    if WITH_ENTROPY:
        grad -= tl.load(grad_entropy + row) * prob * (log_prob + tl.load(entropy + row))
    tl.store(place, (grad * inverse_temperature).to(logits.dtype.element_ty), mask=inside)


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    log_sums: Tensor,
    chosen: Tensor,
    entropy: Tensor | None,
) -> None:
    """Write log-sum-exp, target log-prob and (if given) entropy, each [rows] fp32, of logits [rows, V]."""
    rows, columns = logits.shape
    _row_statistics[(rows,)](
        logits, targets, log_sums, chosen, chosen if entropy is None else entropy, logits.stride(0),
        1.0 / temperature, COLUMNS=columns, WITH_ENTROPY=entropy is not None, BLOCK=_block(columns),
        num_warps=8,
    )  # fmt: skip


def logit_gradient_(
    logits: Tensor,
    targets: Tensor,
    first: int,
    temperature: float,
    log_sums: Tensor,
    grad_chosen: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Overwrite logits [rows, columns], which start at vocabulary entry `first`, with their gradient."""
    rows, columns = logits.shape
    block = _block(columns)
    unused = grad_chosen
    _logit_gradient[(rows, triton.cdiv(columns, block))](
        logits, targets, log_sums, unused if entropy is None else entropy, grad_chosen,
        unused if grad_entropy is None else grad_entropy, logits.stride(0), columns, first, 1.0 / temperature,
        WITH_ENTROPY=grad_entropy is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return logits


def _block(columns: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(columns))
