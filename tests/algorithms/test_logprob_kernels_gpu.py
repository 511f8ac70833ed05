"""The fused log-prob kernels on a GPU against float64, values and gradients."""

import pytest
import torch

from slime.algorithms.logprobs import _kernels, chunked_log_probs

pytestmark = pytest.mark.gpu


def reference(hidden, weight, targets, temperature):
    dist = torch.log_softmax(hidden.double() @ weight.double().T / temperature, dim=-1)
    return dist[torch.arange(len(targets)), targets], -(dist.exp() * dist).sum(-1)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
@pytest.mark.parametrize(("chunk_size", "memory_gib"), [(-1, 0.0), (100, 0.0), (-1, 1.0), (100, 1.0)])
def test_fused_log_probs_match_float64(dtype, close, entropy_weight, chunk_size, memory_gib):
    assert _kernels() is not None
    torch.manual_seed(0)
    hidden = torch.randn(333, 256, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(10007, 256, device="cuda") * 0.1).to(dtype).requires_grad_()
    targets = torch.randint(0, 10007, (333,), device="cuda")
    direction = torch.randn(333, device="cuda")
    results = []
    options = dict(temperature=0.8, chunk_size=chunk_size, memory_gib=memory_gib)
    for pair in (
        chunked_log_probs(hidden, weight, targets, with_entropy=True, **options),
        reference(hidden, weight, targets, 0.8),
    ):
        total = direction.to(pair[0].dtype) @ (pair[0] + entropy_weight * pair[1])
        results.append((*pair, *torch.autograd.grad(total, (hidden, weight))))
    for got, expected in zip(*results, strict=True):
        assert (got.double() - expected).norm() / expected.norm() < close
