"""The steps of a mixture of experts in FP8, with the scaling of FP8 linear layers (`slime/backends/fp8`).

Tokens are scaled once, before each is copied for every expert that it chose. A product that sums over the
rows of an expert, or over the rows of a weight matrix, needs transposed matrices: each expert then has one
factor for all its values.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime.backends.fp8.scaling import ALIGNMENT, FP8, Scaled, by_rows, by_rows_at_once, turn

_SMALLEST = 2.0**-126  # of all factors


class Rows(NamedTuple):
    """Scaled rows [S]: those of `scaled` that `picked` names; None: all of them."""

    scaled: Scaled
    picked: Tensor | None = None


class FP8Steps:
    """Computes the steps of the operator for `dtype` inputs; on a CPU with the same FP8 values in fp32.

    `plain`: the steps in 16 or 32 bits, on the same device.
    """

    def __init__(self, plain: Any, dtype: torch.dtype) -> None:
        self._plain, self._dtype = plain, dtype
        self.combine = plain.combine

    def gather(self, source: Tensor, order: Tensor, top_k: int) -> Rows:
        return Rows(by_rows_at_once(source), order // top_k)

    def product(self, rows: Rows, matrices: Tensor, ends: Tensor) -> Tensor:
        (values, factors), picked = rows
        if picked is not None:
            # Two FP8 numbers travel as one of 16 bits, whose bits a copy keeps.
            values = self._plain.gather(values.view(torch.bfloat16), picked, 1).view(FP8)
            factors = factors[picked]
        weights, scales = _weights(matrices)
        if not values.is_cuda:
            read = weights.float() * scales[:, :, None]
            return self._plain.product(values.float() * factors, read.transpose(1, 2), ends).to(self._dtype)
        return torch._scaled_grouped_mm(
            values, weights.transpose(1, 2), factors.view(-1), scales, offs=ends, out_dtype=self._dtype,
            use_fast_accum=True,
        )  # fmt: skip

    def outer(self, left: Rows, right: Rows, ends: Tensor) -> Tensor:
        layout = _Layout.of(ends, len(left.scaled.values if left.picked is None else left.picked))
        (a, ours), (b, theirs) = (_turned(side, layout) for side in (left, right))
        if not a.is_cuda:
            found = self._plain.outer(a.float().T, b.float().T, layout.ends)
            return (found * (ours * theirs)[:, None, None]).to(self._dtype)
        ours, theirs = ours.repeat_interleave(len(a)), theirs.repeat_interleave(len(b))
        return torch._scaled_grouped_mm(
            a, b.T, ours, theirs, offs=layout.ends, out_dtype=self._dtype, use_fast_accum=True
        )

    def gate(self, both: Tensor, weights: Tensor, order: Tensor) -> Rows:
        if both.is_cuda:
            return Rows(self._plain.gate(both, weights, order, fp8=True))
        return Rows(by_rows(self._plain.gate(both, weights, order)))

    def gate_backward(
        self, both: Tensor, weights: Tensor, order: Tensor, grad: Tensor
    ) -> tuple[Rows, Rows, Tensor]:
        if both.is_cuda:
            wide, narrow, by_choice = self._plain.gate_backward(both, weights, order, grad, fp8=True)
            return Rows(wide), Rows(narrow), by_choice
        wide, narrow, by_choice = self._plain.gate_backward(both, weights, order, grad)
        return Rows(by_rows(wide)), Rows(by_rows(narrow)), by_choice


class _Layout(NamedTuple):
    """Places for the rows of each expert in a sum over rows.

    FP8 products need a positive multiple of ALIGNMENT rows for each expert, so zeros stand between experts.
    """

    rows: Tensor  # row of each place [P], -1: a zero
    experts: Tensor  # expert of each place [P]
    ends: Tensor  # of the experts' places [E]

    @classmethod
    def of(cls, ends: Tensor, rows: int) -> "_Layout":
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        sizes = ((counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).clamp(min=ALIGNMENT)
        stops = sizes.cumsum(0, dtype=torch.int32)
        # The host does not know the sizes: all that are possible fit.
        places = (rows // ALIGNMENT + 1 + len(ends)) * ALIGNMENT
        place = torch.arange(places, dtype=torch.int32, device=ends.device)
        experts = torch.searchsorted(stops, place, right=True).clamp(max=len(ends) - 1)
        row = place + (ends - counts - stops + sizes)[experts]
        return cls(torch.where(row < ends[experts], row, -1), experts, stops)


def _turned(rows: Rows, layout: _Layout) -> tuple[Tensor, Tensor]:
    """Return the transposed values [K, P] and one factor for each expert [E]."""
    (values, factors), picked = rows
    known = layout.rows >= 0
    row = layout.rows.clamp(min=0)
    index = row if picked is None else picked[row]
    own = torch.where(known, factors.view(-1)[index], 0.0)
    blocks = own.view(-1, ALIGNMENT).amax(1)  # each belongs to one expert
    largest = own.new_full((len(layout.ends),), _SMALLEST)
    largest.scatter_reduce_(0, layout.experts[::ALIGNMENT], blocks, "amax")
    shares = own / largest[layout.experts]
    return turn(values, shares[:, None], torch.where(known, index, -1)), largest


def _weights(matrices: Tensor) -> Scaled:
    """[E, K, N] -> values [E, N, K], as products read them, and factors [E, N]."""
    experts, columns, outputs = matrices.shape
    if (turned := matrices.transpose(1, 2)).is_contiguous():
        values, factors = by_rows_at_once(turned.flatten(0, 1))
        return Scaled(values.view(turned.shape), factors.view(experts, outputs))
    values, factors = by_rows_at_once(matrices.flatten(0, 1))
    by_expert = factors.view(experts, columns)
    largest = by_expert.amax(1, keepdim=True)
    values = turn(values, (by_expert / largest).view(-1, 1))
    return Scaled(values.view(outputs, experts, columns).transpose(0, 1), largest.repeat(1, outputs))
