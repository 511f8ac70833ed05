"""Stores Adam's moments in fewer bits: bf16; or fp16 and fp8 with a power of two per block of numbers.

Rounding is stochastic. A moment moves by a small share of itself in a step (0.1% of the second one at beta2
0.999), less than half the distance between two 16-bit numbers: rounded to the nearest it would never change.
Formats with blocks keep the root of the second moment, which halves the range of exponents.

The result of `unpack` is exact in float32, and packing it again gives the same bits: a checkpoint holds
moments in float32, and a resumed run has identical moments.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # numbers that share a scale
_MANTISSA = 23  # bits of a float32
_SMALLEST_EXPONENT = -120  # of a scale: both it and its inverse are normal float32 numbers


@dataclass(frozen=True, slots=True)
class MomentFormat:
    """Storage format of one of Adam's moments."""

    dtype: torch.dtype
    mantissa: int  # bits
    top: int | None = None  # the largest number of a block is at most 2**top; None: the range of float32
    smallest: float = 0.0  # smallest scaled number above zero


FORMATS = {
    "fp32": MomentFormat(torch.float32, _MANTISSA),
    "bf16": MomentFormat(torch.bfloat16, 7),
    "fp16": MomentFormat(torch.float16, 10, top=15, smallest=2.0**-24),
    "fp8": MomentFormat(torch.float8_e4m3fn, 3, top=8, smallest=2.0**-9),
}


def blocks_of(count: int) -> int:
    return -(-count // BLOCK)


def pack(values: Tensor, kept: MomentFormat, *, second: bool, generator: torch.Generator) -> list[Tensor]:
    """Convert numbers [n] to the format; return also the exponents of blocks [ceil(n / 256)], if any."""
    if kept.top is None:
        return [_round(values, kept, generator).to(kept.dtype)]
    numbers = values.sqrt() if second else values
    blocks = F.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)
    largest = torch.frexp(blocks.abs().amax(1))
    # The smallest power of two that the largest number does not exceed, so that packing is idempotent.
    exponents = largest.exponent - (largest.mantissa == 0.5).int() - kept.top
    exponents = exponents.clamp(min=_SMALLEST_EXPONENT)
    scaled = _round(blocks * _power(-exponents), kept, generator)
    if second:
        # A second moment of zero with a nonzero first one would make an enormous update.
        scaled = torch.where(blocks > 0, scaled.clamp(min=kept.smallest), scaled)
    return [scaled.view(-1)[: len(values)].to(kept.dtype), exponents.to(torch.int8)]


def unpack(parts: list[Tensor], *, second: bool) -> Tensor:
    """Return the numbers [n] in float32."""
    numbers = parts[0].float()
    if len(parts) == 1:
        return numbers
    count = len(numbers)
    blocks = F.pad(numbers, (0, -count % BLOCK)).view(-1, BLOCK) * _power(parts[1].int())
    numbers = blocks.view(-1)[:count]
    return numbers.square() if second else numbers


def _power(exponents: Tensor) -> Tensor:
    """Return 2 to the power of each, exactly, as a column."""
    return ((exponents + 127) << _MANTISSA).view(torch.float32)[:, None]


def _round(values: Tensor, kept: MomentFormat, generator: torch.Generator) -> Tensor:
    """Round float32 numbers to the format's bits, up or down at random, so that the mean is unbiased."""
    spare = _MANTISSA - kept.mantissa
    noise = torch.randint(
        0, 1 << spare, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    return ((values.view(torch.int32) + noise) & -(1 << spare)).view(torch.float32)
