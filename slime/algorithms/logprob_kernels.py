"""Triton kernels for a block of logits: log-sum-exp, chosen logit and entropy of each row, and the gradient in place.

Each is one pass over logits in the precision that the matrix product wrote, with fp32 arithmetic inside. Rows are the tokens;
columns are a part of the vocabulary or all of it. Imported only on CUDA machines (or under Triton's interpreter).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _row_statistics(
    logits, targets, log_sums, chosen, entropy, stride, inverse_temperature,
    COLUMNS: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Each lane keeps its own maximum, sum of exp(x - top) and sum of exp(x - top) * (x - top) over every BLOCK-th column: no lane
    # waits for another before the end, and one exponential serves both cases, a new maximum and a smaller value.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, COLUMNS, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        x = tl.load(start + offsets, mask=offsets < COLUMNS, other=float("-inf")).to(tl.float32) * inverse_temperature
        rises = x > top
        # Infinities meet where a lane has seen nothing yet and behind the last column; their difference would be NaN.
        apart = tl.where(x == top, 0.0, -tl.abs(x - top))
        e = tl.exp(apart)
        if WITH_ENTROPY:
            risen = tl.where(e > 0, e * (weighted + apart * total), 0.0)
            weighted = tl.where(rises, risen, weighted + tl.where(e > 0, e * apart, 0.0))
        total = tl.where(rises, total * e + 1.0, total + e)
        top = tl.maximum(top, x)
    highest = tl.max(top, axis=0)
    below = top - highest
    share = tl.exp(below)
    sum_of_all = tl.sum(share * total, axis=0)
    log_total = tl.log(sum_of_all)
    tl.store(log_sums + row, highest + log_total)
    target = tl.load(targets + row)
    tl.store(chosen + row, tl.load(start + target).to(tl.float32) * inverse_temperature - highest - log_total)
    if WITH_ENTROPY:
        all_weighted = tl.sum(tl.where(share > 0, share * (weighted + below * total), 0.0), axis=0)
        tl.store(entropy + row, log_total - all_weighted / sum_of_all)


@triton.jit
def _logit_gradient(
    logits, targets, log_sums, entropy, grad_chosen, grad_entropy, stride, columns, first, inverse_temperature,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    place = logits + row * stride + offsets
    log_prob = tl.load(place, mask=inside, other=0.0).to(tl.float32) * inverse_temperature - tl.load(log_sums + row)
    prob = tl.exp(log_prob)
    g = tl.load(grad_chosen + row)
    target = tl.load(targets + row) - first
    # d log p(target) / d logits = onehot - p;  d H / d logits = -p (log p + H)
    grad = tl.where(offsets == target, g, 0.0) - g * prob
    if WITH_ENTROPY:
        grad -= tl.load(grad_entropy + row) * prob * (log_prob + tl.load(entropy + row))
    tl.store(place, (grad * inverse_temperature).to(logits.dtype.element_ty), mask=inside)


def row_statistics(
    logits: Tensor, targets: Tensor, temperature: float, log_sums: Tensor, chosen: Tensor, entropy: Tensor | None
) -> None:
    """Fills log-sum-exp, log-prob of the target and (if given) entropy, each [rows] fp32, from logits [rows, vocabulary]."""
    rows, columns = logits.shape
    _row_statistics[(rows,)](
        logits, targets, log_sums, chosen, chosen if entropy is None else entropy, logits.stride(0),
        1.0 / temperature, COLUMNS=columns, WITH_ENTROPY=entropy is not None, BLOCK=_block(columns), num_warps=8,
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
    """Overwrites logits [rows, columns], whose first column is vocabulary entry `first`, by the loss's gradient in them."""
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


def usable(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)
