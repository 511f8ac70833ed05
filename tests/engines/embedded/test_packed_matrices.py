"""Products with packed copies of matrices are those with the matrices, also once these have changed."""

import pytest
import torch
from torch import nn

from slime.engines.embedded import packed_matrices
from slime.engines.embedded.packed_matrices import PackedMatrices
from slime.engines.embedded.weight_update import GroupSource, WeightStore

needs_library = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without Intel's MKL")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1031, 96)
        self.inner = nn.Linear(96, 96)
        self.head = nn.Linear(96, 1031, bias=False)
        self.head.weight = self.embedding.weight
        self.requires_grad_(False)

    def forward(self, ids):
        return self.head(self.inner(self.embedding(ids)))


@needs_library
@pytest.mark.parametrize("shape", [(1,), (1, 7), (48,), (1, 200)])
def test_products_are_those_with_the_matrices(monkeypatch, shape):
    monkeypatch.setattr(packed_matrices, "_LARGE_MATRIX", 1)
    torch.manual_seed(0)
    plain, ours = Tied(), Tied()
    matrices = PackedMatrices(ours)
    ids = torch.randint(0, 1031, shape)
    assert not torch.allclose(ours(ids), plain(ids))
    source = GroupSource({name: p.clone() for name, p in plain.named_parameters()})
    WeightStore(ours).apply(source)
    torch.testing.assert_close(ours(ids), plain(ids))
    assert matrices._packed.keys() == {ours.inner, ours.head}
    ours.inner.weight.mul_(2)
    plain.inner.weight.mul_(2)
    matrices.forget()
    torch.testing.assert_close(ours(ids), plain(ids))


def test_small_matrices_and_those_of_16_bits_stay_as_they_are(monkeypatch):
    small, model = Tied(), Tied().to(torch.bfloat16)
    PackedMatrices(small.inner)
    monkeypatch.setattr(packed_matrices, "_LARGE_MATRIX", 1)
    PackedMatrices(model)
    assert not any("forward" in vars(layer) for layer in (small.inner, model.inner, model.head))


def test_a_torch_without_the_library_multiplies_as_before(monkeypatch):
    monkeypatch.setattr(packed_matrices, "_LARGE_MATRIX", 1)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    model = Tied()
    PackedMatrices(model)
    assert "forward" not in vars(model.head)


@needs_library
def test_a_model_as_large_as_the_free_memory_is_not_kept_twice(monkeypatch):
    monkeypatch.setattr(packed_matrices, "_LARGE_MATRIX", 1)
    monkeypatch.setattr(packed_matrices, "_MEMORY_SHARE", 0.0)
    model = Tied()
    PackedMatrices(model)
    assert "forward" not in vars(model.head)
