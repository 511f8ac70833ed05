"""Attention by plain products against torch's own softmax and autograd."""

import pytest
import torch
from torch import Tensor

from slime.backends.attention.short_products import attend_with_mask


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    count = query.shape[2] // key.shape[2]
    keys, values = (x.repeat_interleave(count, dim=2) for x in (key, value))
    scores = torch.einsum("blhd,bkhd->bhlk", query, keys) * scale + mask
    return torch.einsum("bhlk,bkhd->blhd", scores.softmax(-1), values)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 9, 130])
def test_results_and_gradients_are_those_of_torch(groups: int, length: int) -> None:
    generator = torch.Generator().manual_seed(groups + length)
    shapes = [(3, length, 4, 8), (3, length, groups, 8), (3, length, groups, 6)]
    inputs = [3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu_(1)
    weights = torch.randn(3, length, 4, 6, generator=generator, dtype=torch.float64)
    found = []
    for attend, hidden in ((attend_with_mask, mask.repeat_interleave(4 // groups, 0)), (_plain, mask)):
        parts = [x.clone().requires_grad_() for x in inputs]
        out = attend(*parts, hidden, 0.3)
        found.append((out, *torch.autograd.grad((out * weights).sum(), parts)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_hidden_keys_weigh_nothing() -> None:
    query, key, value = (torch.randn(2, 3, 1, 4) for _ in range(3))
    mask = torch.full((3, 3), -torch.inf).triu_(1)
    value[:, 2] = 1e30
    out = attend_with_mask(query, key, value, mask, 0.5)
    assert out[:, :2].abs().max() < 1e6
