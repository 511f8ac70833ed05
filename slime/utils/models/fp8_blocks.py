"""Quantizes weights in FP8 blocks: e4m3 values and one fp32 factor per block, as in FP8 checkpoints.

A block is `weight_block_size` rows and columns (usually 128 x 128); the last ones may be smaller. Values are
multiplied with the stored factor, although checkpoints call it `weight_scale_inv`.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SCALE_SUFFIX = "_scale_inv"  # appended to the name of the weight
_LOWEST_EXPONENT = -5  # frexp's exponent of the smallest normal number, 2^-6


def quantize_blocks(
    weight: Tensor, block: tuple[int, int], *, powers_of_two: bool = False, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize a weight [M, N]: return e4m3 [M, N] and factors fp32 [ceil(M / rows), ceil(N / columns)].

    The error of a value is at most 2^-4 of it, or 2^-10 of its block's factor if it is tiny. Blocks of zeros
    get factor 1. `powers_of_two` rounds factors up, for kernels that keep only the exponent. With `noise`
    [M, N], uniform in (0, 1), a value is rounded to either neighbour and is right on average; the bounds are
    twice as wide. Values that FP8 can express stay unchanged either way.
    """
    rows, columns = block
    if weight.is_cuda and noise is None and not powers_of_two:
        from slime.utils.models import fp8_block_kernels

        if fp8_block_kernels.can_quantize(weight, block):
            return fp8_block_kernels.quantize(weight, block)
    tiles = _tiles(weight.float(), rows, columns)
    largest = tiles.abs().amax(dim=(1, 3))
    # The divisor is a tensor: a GPU divides by a Python number through its reciprocal, which rounds
    # differently from a CPU.
    scale = (largest / torch.full_like(largest, LARGEST)).clamp(min=torch.finfo(torch.float32).tiny)
    if powers_of_two:
        fraction, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).to(exponent.dtype))
    scale = torch.where(largest == 0, 1.0, scale)
    # Out of range, the cast saturates on some devices and gives NaN on others, so values are clamped.
    values = _untile((tiles / scale[:, None, :, None]).clamp(-LARGEST, LARGEST), weight.shape)
    return (values if noise is None else _round_by(noise, values)).to(FP8), scale


def uniform_noise(shape: torch.Size, seed: int, device: torch.device | str) -> Tensor:
    """Return numbers in (0, 1) that depend only on seed and index, so they are equal on every device.

    None is within 2^-17 of 0 or 1, so a value that differs from an e4m3 number only by fp32 rounding becomes
    that number.
    """
    x = torch.arange(shape.numel(), dtype=torch.int32, device=device)
    # A hash of the index in wrapping 32-bit integers; shifts are masked, because they copy the sign bit.
    x = x.mul_(_signed(0x9E3779B1)).add_(_signed(seed))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = x.bitwise_xor_((x >> shift) & ((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return (((x & 0xFFFF).float() + 0.5) * 2.0**-16).view(shape)


def _signed(number: int) -> int:
    """Return the 32-bit integer with these bits."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number


def _round_by(noise: Tensor, values: Tensor) -> Tensor:
    """Round each value to the e4m3 number below or above it, by comparing the remainder with the noise."""
    _, exponent = torch.frexp(values)
    # Numbers of one binade are 2^(exponent - 4) apart; subnormal ones as far as in the lowest binade.
    step = torch.ldexp(torch.ones_like(values), exponent.clamp(min=_LOWEST_EXPONENT) - 4)
    return ((values / step + noise).floor() * step).clamp(-LARGEST, LARGEST)


def dequantize_blocks(values: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weight [M, N] of e4m3 values and their factors."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    tiles = _tiles(values.to(compute), *block)
    if tuple(scale.shape) != (tiles.shape[0], tiles.shape[2]):
        raise ValueError(
            f"an FP8 weight of shape {tuple(values.shape)} in blocks of {tuple(block)} has factors of shape "
            f"{(tiles.shape[0], tiles.shape[2])}, not {tuple(scale.shape)}"
        )
    return _untile(tiles * scale.to(compute)[:, None, :, None], values.shape).to(dtype)


def dequantize_part(values: Tensor, scale: Tensor, block: tuple[int, int], start: tuple[int, int]) -> Tensor:
    """Dequantize a part of a weight, in fp32, that begins at row and column `start`; `scale` is whole."""
    rows = torch.arange(start[0], start[0] + values.shape[0]) // block[0]
    columns = torch.arange(start[1], start[1] + values.shape[1]) // block[1]
    return values.float().mul_(scale.float()[rows][:, columns])


def _tiles(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Reshape [M, N] -> [M / rows, rows, N / columns, columns], padded with zeros if needed."""
    m, n = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -n % columns, 0, -m % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _untile(tiles: Tensor, shape: torch.Size) -> Tensor:
    flat = tiles.reshape(tiles.shape[0] * tiles.shape[1], -1)
    return flat[: shape[0], : shape[1]].contiguous()
