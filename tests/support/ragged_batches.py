"""Ragged batches for the mathematics tests: several samples of different length, in both layouts."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

# Lengths of 1 to 6 tokens, masks by seed: all zeros and single tokens are among them.
lengths_strategy = st.lists(st.integers(1, 6), min_size=1, max_size=5)
seeds = st.integers(0, 10_000)


@dataclass
class Ragged:
    """Per-sample lists; `flat(name)` is their concatenation."""

    new: list[Tensor]
    old: list[Tensor]
    rollout: list[Tensor]
    reference: list[Tensor]
    advantages: list[Tensor]
    masks: list[Tensor]

    @property
    def lengths(self) -> list[int]:
        return [len(x) for x in self.new]

    @property
    def segments(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.new)), torch.tensor(self.lengths))

    def flat(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.cat(getattr(self, name)).to(dtype)


def make(lengths: list[int], seed: int) -> Ragged:
    """Log-probs around -1, advantages constant per sample (of both signs, sometimes 0), masks of any kind."""
    g = torch.Generator().manual_seed(seed)

    def normal(n: int, scale: float = 1.0) -> Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64) * scale

    new = [-torch.rand(n, generator=g, dtype=torch.float64) * 2 - 0.05 for n in lengths]

    def near(scale: float) -> list[Tensor]:
        return [(x + normal(len(x), scale)).clamp(max=-0.01) for x in new]

    masks = [torch.randint(0, 2, (n,), generator=g).double() for n in lengths]
    if seed % 7 == 0:
        masks[0] = torch.zeros_like(masks[0])
    return Ragged(
        new=new,
        old=near(0.3),
        rollout=near(0.4),
        reference=near(0.5),
        advantages=[normal(1).expand(n).clone() for n in lengths],
        masks=masks,
    )


def close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64) -> None:
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got.double(), torch.as_tensor(expected).double(), **tolerance)
