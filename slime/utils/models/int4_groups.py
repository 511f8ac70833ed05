"""Quantizes weights to 4 bits in groups of a row, and packs them as compressed-tensors does (W4A16)."""

import torch
from torch import Tensor

GROUP = 32  # values that share a scale
_LARGEST = 7


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> whole numbers from -7 to 7 in fp32 [..., K], and bf16 scales [..., K / 32]."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    # By a reciprocal, because a GPU divides by a Python number differently from a CPU.
    scales = (groups.abs().amax(-1) * (1 / _LARGEST)).bfloat16()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (groups / scales.float()[..., None]).round().clamp(-_LARGEST, _LARGEST).flatten(-2), scales


def dequantize_groups(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight as an engine reads it: exact products of values and scales, rounded to `dtype`."""
    return (values.float().unflatten(-1, (-1, GROUP)) * scales.float()[..., None]).flatten(-2).to(dtype)


def fake_quantized(weight: Tensor) -> Tensor:
    return dequantize_groups(*quantize_groups(weight), weight.dtype)


def pack(values: Tensor) -> Tensor:
    """[N, K] -> int32 [N, K / 8]: eight values plus 8 in a word, the first in its lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
    words = (values.to(torch.int32) + 8).unflatten(-1, (-1, 8)) << shifts
    return words.sum(-1, dtype=torch.int32)
