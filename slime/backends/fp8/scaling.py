"""Represents matrices as e4m3 values with scale factors that are powers of two.

A matrix is scaled by rows, so that the largest number of each row is near the largest of e4m3. A product sums
over columns; if it must sum over rows, the matrix is transposed, with one factor for all of it. Since factors
are powers of two, this shifts exponents, and rounds again only numbers that fall below e4m3's smallest normal
number, which are negligible compared with the row of the largest factor.
"""

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

with contextlib.suppress(ImportError):  # machines without Triton have no GPU that needs it
    from slime.backends.fp8 import fp8_kernels

FP8 = torch.float8_e4m3fn
# Sides of a product are multiples of it.
ALIGNMENT = 16
# e4m3 ends at 448 = 1.75 x 2^8. Added to the bits of a float, this carries into its exponent from 1.75 on.
_UP_FROM_7_4, _MANTISSA_BITS, _LARGEST_EXPONENT = 0x1FFFFF, 23, 8


class Scaled(NamedTuple):
    """A scaled matrix: `values * factors`. Factors are [rows, 1], or a scalar."""

    values: Tensor
    factors: Tensor


def by_rows(matrix: Tensor) -> Scaled:
    """[M, K] with a factor per row; each value is off by at most 2^-4 of itself, or 2^-18 of its row's
    largest. A row with a non-finite value has the factor NaN.
    """
    largest = matrix.abs().amax(dim=1, keepdim=True).float()
    exponent = ((largest.view(torch.int32) + _UP_FROM_7_4) >> _MANTISSA_BITS) - _LARGEST_EXPONENT
    exponent = exponent.clamp(min=1)
    factors = (exponent << _MANTISSA_BITS).view(torch.float32)
    inverse = ((254 - exponent) << _MANTISSA_BITS).view(torch.float32)
    # Casts of infinity differ by device (some give the largest number), so the factor marks it.
    factors = torch.where(largest.isfinite(), factors, torch.nan)
    return Scaled((matrix.float() * inverse).to(FP8), factors)


def turned(matrix: Scaled) -> Scaled:
    """Return the transpose [K, M] with one factor; M is zero-padded to a multiple that products need."""
    largest = matrix.factors.amax()
    return Scaled(turn(matrix.values, matrix.factors / largest), largest)


def turn(values: Tensor, shares: Tensor, index: Tensor | None = None) -> Tensor:
    """Return the transpose of values[index] * shares [M, 1], which are powers of two of at most 1.

    M is zero-padded; index -1 is a row of zeros.
    """
    rows, size = shares.shape[0], _aligned(shares.shape[0])
    if values.is_cuda:
        return fp8_kernels.turn(values.contiguous(), shares, index, size)
    plain = values.float()
    if index is not None:
        plain = plain[index.long()] * (index >= 0)[:, None]
    return F.pad(plain * shares, (0, 0, 0, size - rows)).to(FP8).T.contiguous()


def by_rows_at_once(matrix: Tensor) -> Scaled:
    """Like `by_rows`, for code that is not compiled: on a GPU one kernel."""
    return Scaled(*fp8_kernels.by_rows(matrix)) if matrix.is_cuda else by_rows(matrix)


def _aligned(size: int) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def product(left: Scaled, right: Scaled, dtype: torch.dtype) -> Tensor:
    """left [M, K] @ right [N, K].T. On a GPU by its FP8 units; elsewhere the same values in fp32."""
    if not left.values.is_cuda:
        return (_plain(left) @ _plain(right).T).to(dtype)
    ours, theirs = left.factors, right.factors
    if ours.dim():  # FP8 units need factors by row on both sides or on none
        theirs = theirs.expand(right.values.shape[0], 1).contiguous().T
    return torch._scaled_mm(
        left.values, right.values.T, ours, theirs, out_dtype=dtype, use_fast_accum=bool(ours.dim())
    )


def _plain(matrix: Scaled) -> Tensor:
    return matrix.values.float() * matrix.factors
