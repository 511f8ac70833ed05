"""The fused log-prob kernels on a GPU against float64, values and gradients."""

import pytest
import torch

from slime.algorithms.logprobs import _kernels, chunked_log_probs
from slime.algorithms.nucleus import Nucleus

pytestmark = pytest.mark.gpu


def reference(hidden, weight, targets, temperature, keep=None):
    logits = hidden.double() @ weight.double().T / temperature
    dist = torch.log_softmax(logits if keep is None else logits.masked_fill(~keep, float("-inf")), dim=-1)
    entropy = -(dist.exp() * dist.masked_fill(dist.isinf(), 0.0)).sum(-1)
    return dist[torch.arange(len(targets)), targets], entropy


def some_ids(targets, vocab):
    """A nucleus of some ids per row, none for every seventh, and the same as a mask."""
    keep = torch.rand(len(targets), vocab, device="cuda") < 0.01
    keep[torch.arange(len(targets)), targets] = True
    counts = keep.sum(-1).cpu()
    rows = [row.nonzero()[:, 0].int().cpu() if i % 7 else torch.zeros(0).int() for i, row in enumerate(keep)]
    counts[::7] = 0
    keep[::7] = True
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Nucleus.of([torch.cat(rows)], [offsets]).to(torch.device("cuda")), keep


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
@pytest.mark.parametrize(("chunk_size", "memory_gib"), [(-1, 0.0), (100, 0.0), (-1, 1.0), (100, 1.0)])
@pytest.mark.parametrize("cut", [False, True])
def test_fused_log_probs_match_float64(dtype, close, entropy_weight, chunk_size, memory_gib, cut):
    assert _kernels() is not None
    torch.manual_seed(0)
    hidden = torch.randn(333, 256, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(10007, 256, device="cuda") * 0.1).to(dtype).requires_grad_()
    targets = torch.randint(0, 10007, (333,), device="cuda")
    direction = torch.randn(333, device="cuda")
    results = []
    nucleus, keep = some_ids(targets, 10007) if cut else (None, None)
    options = dict(temperature=0.8, chunk_size=chunk_size, memory_gib=memory_gib, nucleus=nucleus)
    for pair in (
        chunked_log_probs(hidden, weight, targets, with_entropy=True, **options),
        reference(hidden, weight, targets, 0.8, keep),
    ):
        total = direction.to(pair[0].dtype) @ (pair[0] + entropy_weight * pair[1])
        results.append((*pair, *torch.autograd.grad(total, (hidden, weight))))
    for got, expected in zip(*results, strict=True):
        assert (got.double() - expected).norm() / expected.norm() < close
