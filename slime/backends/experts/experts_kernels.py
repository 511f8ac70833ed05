"""The steps of a mixture of experts by Triton kernels and torch's grouped products; only on CUDA machines.

A "row" is one choice: a token at one of its experts. Rows stand in the order of the experts. `order[row]` is
the flat place of the choice (token * k + number of the choice), `place[token, number]` is the row, and rows
from `ends[-1]` on belong to no expert of this rank: their contents mean nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather(  # type: ignore[no-untyped-def]  # Triton reads annotations, and pointers have none
    source, order, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token = (tl.load(order + row) // TOP_K).to(tl.int64)
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        values = tl.load(source + token * WIDTH + columns, mask=inside, other=0.0)
        tl.store(out + row * WIDTH + columns, values, mask=inside)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]  # as above
    rows, place, ends, out,
    LAST: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    known = tl.load(ends + LAST)
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        total = tl.zeros((BLOCK,), tl.float32)
        for number in tl.static_range(TOP_K):
            row = tl.load(place + token * TOP_K + number).to(tl.int64)
            there = inside & (row < known)
            total += tl.load(rows + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
        tl.store(out + token * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(  # type: ignore[no-untyped-def]  # as above
    both, weights, order, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        gate = tl.load(both + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(both + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * weight
        tl.store(out + row * WIDTH + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(  # type: ignore[no-untyped-def]  # as above
    both, weights, order, grad, grad_both, again, grad_weights, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(order + row)
    weight = tl.load(weights + choice).to(tl.float32)
    along_weight = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        gate = tl.load(both + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(both + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        along_weight += g * silu * up
        g *= weight
        grad_gate = g * up * (share + silu * (1.0 - share))
        tl.store(grad_both + row * 2 * WIDTH + columns, grad_gate.to(grad_both.dtype.element_ty), mask=inside)
        tl.store(
            grad_both + row * 2 * WIDTH + WIDTH + columns,
            (g * silu).to(grad_both.dtype.element_ty),
            mask=inside,
        )
        tl.store(again + row * WIDTH + columns, (silu * up * weight).to(again.dtype.element_ty), mask=inside)
    tl.store(grad_weights + choice, tl.sum(along_weight, axis=0))


def _block(width: int) -> int:
    return min(1024, triton.next_power_of_2(width))


def gather(source: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return each row's token: [S, H] from [T, H]."""
    width = source.shape[1]
    out = source.new_empty(len(order), width)
    _gather[(len(order),)](source, order, out, TOP_K=top_k, WIDTH=width, BLOCK=_block(width), num_warps=4)
    return out


def combine(rows: Tensor, place: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of each token's rows: [T, H] from [S, H], accumulated in fp32."""
    tokens, top_k = place.shape
    width = rows.shape[1]
    out = rows.new_empty(tokens, width)
    _combine[(tokens,)](
        rows, place, ends, out, LAST=len(ends) - 1, TOP_K=top_k, WIDTH=width, BLOCK=_block(width), num_warps=4
    )
    return out


def product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each 16-bit expert by its matrix."""
    return torch._grouped_mm(rows, matrices, offs=ends)


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's transposed rows by its other rows: the gradient of its matrix."""
    return torch._grouped_mm(left.T, right, offs=ends)


def gate(both: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Return silu(gate) * up * routing weight: [S, I] from [S, 2I]."""
    width = both.shape[1] // 2
    out = both.new_empty(len(both), width)
    _gate[(len(both),)](both, weights, order, out, WIDTH=width, BLOCK=_block(width), num_warps=4)
    return out


def gate_backward(
    both: Tensor, weights: Tensor, order: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up [S, 2I], the gated values once more [S, I], gradients of the weights [S] fp32
    by choice."""
    width = both.shape[1] // 2
    grad_both, again = torch.empty_like(both), torch.empty_like(grad)
    grad_weights = torch.empty(len(both), dtype=torch.float32, device=both.device)
    _gate_backward[(len(both),)](
        both, weights, order, grad, grad_both, again, grad_weights, WIDTH=width, BLOCK=_block(width),
        num_warps=4,
    )  # fmt: skip
    return grad_both, again, grad_weights
