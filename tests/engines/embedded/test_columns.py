"""Matrices that an engine stores by column are the same matrices: to passes, updates and checksums."""

import torch
from torch import nn

from slime.engines.embedded import weight_update
from slime.engines.embedded.weight_update import GroupSource, WeightStore, store_by_column


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.inner(self.embedding(ids)))


def test_updates_reach_matrices_that_are_stored_by_column(monkeypatch):
    monkeypatch.setattr(weight_update, "_BLOCK_ROWS", 3)
    monkeypatch.setattr(weight_update, "_LARGE_MATRIX", 1)
    torch.manual_seed(0)
    plain, ours, ids = Tied(), Tied(), torch.tensor([3, 1, 4])
    store_by_column(ours)
    assert ours.head.weight is ours.embedding.weight
    assert not ours.head.weight.is_contiguous()
    assert not torch.allclose(ours(ids), plain(ids))
    source = GroupSource({name: p.detach().clone() for name, p in plain.named_parameters()})
    store = WeightStore(ours)
    store.check(source)
    store.apply(source)
    torch.testing.assert_close(ours(ids), plain(ids))
    assert store.differing(source) == []
    assert store.checksums() == WeightStore(plain).checksums()


def test_small_matrices_and_those_of_16_bits_stay_as_they_are(monkeypatch):
    small = Tied()
    store_by_column(small)
    monkeypatch.setattr(weight_update, "_LARGE_MATRIX", 1)
    model = Tied().to(torch.bfloat16)
    store_by_column(model)
    assert small.inner.weight.is_contiguous() and model.inner.weight.is_contiguous()
