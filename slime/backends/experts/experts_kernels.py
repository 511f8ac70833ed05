"""The steps of a mixture of experts by Triton kernels and torch's grouped products; only on CUDA machines.

A "row" is one choice: a token at one of its experts. Rows stand in the order of the experts. `order[row]` is
the flat place of the choice (token * k + number of the choice), `place[token, number]` is the row, and rows
from `ends[-1]` on belong to no expert of this rank: their contents mean nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.backends.fp8.fp8_kernels import factors_of, size_of
from slime.backends.fp8.scaling import FP8, Scaled


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
def _gated(  # type: ignore[no-untyped-def]  # as above
    both, row, columns, WIDTH: tl.constexpr
):
    """Return sigmoid(gate), silu(gate) and up in some columns of a row."""
    inside = columns < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    return share, gate * share, up


@triton.jit
def _gate(  # type: ignore[no-untyped-def]  # as above
    both, weights, order, out, factors, FP8: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    inverse = 1.0
    if FP8:
        size = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, WIDTH, BLOCK):
            _share, silu, up = _gated(both, row, begin + tl.arange(0, BLOCK), WIDTH)
            size = tl.maximum(size, size_of(silu * up * weight))
        factor, inverse = factors_of(tl.max(size, axis=0))
        tl.store(factors + row, factor)
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        _share, silu, up = _gated(both, row, columns, WIDTH)
        value = (silu * up * weight * inverse).to(out.dtype.element_ty)
        tl.store(out + row * WIDTH + columns, value, mask=columns < WIDTH)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]  # as above
    both, grad, row, columns, weight, WIDTH: tl.constexpr
):
    """Return gradients of gate and up, gated values, and terms of the routing weight's gradient."""
    share, silu, up = _gated(both, row, columns, WIDTH)
    g = tl.load(grad + row * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    along_weight = g * silu * up
    g *= weight
    return g * up * (share + silu * (1.0 - share)), g * silu, silu * up * weight, along_weight


@triton.jit
def _gate_backward(  # type: ignore[no-untyped-def]  # as above
    both, weights, order, grad, grad_both, again, grad_weights, grad_factors, factors,
    FP8: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(order + row)
    weight = tl.load(weights + choice).to(tl.float32)
    inverse, grad_inverse = 1.0, 1.0
    if FP8:
        size, grad_size = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, WIDTH, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            grad_gate, grad_up, gated, _along = _gradients(both, grad, row, columns, weight, WIDTH)
            size = tl.maximum(size, size_of(gated))
            grad_size = tl.maximum(grad_size, tl.maximum(size_of(grad_gate), size_of(grad_up)))
        factor, inverse = factors_of(tl.max(size, axis=0))
        grad_factor, grad_inverse = factors_of(tl.max(grad_size, axis=0))
        tl.store(factors + row, factor)
        tl.store(grad_factors + row, grad_factor)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        grad_gate, grad_up, gated, along_weight = _gradients(both, grad, row, columns, weight, WIDTH)
        total += along_weight
        grad_gate = (grad_gate * grad_inverse).to(grad_both.dtype.element_ty)
        grad_up = (grad_up * grad_inverse).to(grad_both.dtype.element_ty)
        tl.store(grad_both + row * 2 * WIDTH + columns, grad_gate, mask=inside)
        tl.store(grad_both + row * 2 * WIDTH + WIDTH + columns, grad_up, mask=inside)
        tl.store(again + row * WIDTH + columns, (gated * inverse).to(again.dtype.element_ty), mask=inside)
    tl.store(grad_weights + choice, tl.sum(total, axis=0))


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


def gate(both: Tensor, weights: Tensor, order: Tensor, fp8: bool = False) -> Any:
    """Return silu(gate) * up * routing weight: [S, I] from [S, 2I]. `fp8`: values and factors."""
    width = both.shape[1] // 2
    out, factors = _outputs(both, width, fp8)
    _gate[(len(both),)](
        both, weights, order, out, factors, FP8=fp8, WIDTH=width, BLOCK=_block(width), num_warps=4
    )
    return Scaled(out, factors) if fp8 else out


def gate_backward(
    both: Tensor, weights: Tensor, order: Tensor, grad: Tensor, fp8: bool = False
) -> tuple[Any, Any, Tensor]:
    """Gradients of gate and up [S, 2I], the gated values once more [S, I], gradients of the weights [S] fp32
    by choice. `fp8`: values and factors of the first two."""
    width = both.shape[1] // 2
    grad_both, grad_factors = _outputs(both, 2 * width, fp8)
    again, factors = _outputs(both, width, fp8)
    grad_weights = torch.empty(len(both), dtype=torch.float32, device=both.device)
    _gate_backward[(len(both),)](
        both, weights, order, grad, grad_both, again, grad_weights, grad_factors, factors,
        FP8=fp8, WIDTH=width, BLOCK=_block(width), num_warps=4,
    )  # fmt: skip
    if fp8:
        return Scaled(grad_both, grad_factors), Scaled(again, factors), grad_weights
    return grad_both, again, grad_weights


def _outputs(like: Tensor, width: int, fp8: bool) -> tuple[Tensor, Tensor]:
    """Return storage for rows, and for their factors."""
    out = like.new_empty(len(like), width, dtype=FP8 if fp8 else like.dtype)
    return out, like.new_empty(len(like) if fp8 else 0, 1, dtype=torch.float32)
