"""The fused log-prob kernels under Triton's interpreter against float64: what a GPU would run, on a CPU.

The interpreter is chosen when Triton is imported, so the comparison runs in a process of its own; a CPU build
of torch comes without Triton, SGLang's environment has it.
"""

import os
import subprocess
from pathlib import Path

import pytest
from patience import PATIENCE_S

from slime.arguments.passthrough.sglang_flags import need_python

pytestmark = pytest.mark.sglang

COMPARISON = """
import sys, torch
from slime.algorithms import logprob_kernels as kernels
from slime.algorithms.nucleus import IMPOSSIBLE
torch.manual_seed(0)
for rows, columns, cut in ((3, 5, 0), (4, 300, 0), (2, 10007, 0), (3, 10007, 9000), (3, 300, 299)):
    logits = 4 * torch.randn(rows, columns)
    logits[0, 1] = 60.0  # far above the rest: the sum's other terms vanish
    logits[1] = -1000.0 + torch.arange(columns) / columns
    logits[:, :cut] = IMPOSSIBLE  # whole blocks of it
    targets = torch.randint(cut, columns, (rows,))
    log_sums, chosen, entropy, without, once_more = (torch.empty(rows) for _ in range(5))
    kernels.row_statistics(logits, targets, 0.7, log_sums, chosen, entropy)
    kernels.row_statistics(logits, targets, 0.7, once_more, without, None)
    leaf = logits.double().requires_grad_()
    dist = torch.log_softmax(leaf / 0.7, dim=-1)
    expected = dist[torch.arange(rows), targets], -(dist.exp() * dist).sum(-1)
    close = dict(rtol=2e-5, atol=2e-4)
    torch.testing.assert_close(log_sums.double(), torch.logsumexp(leaf.detach() / 0.7, -1), **close)
    wanted = tuple(x.detach() for x in expected)
    torch.testing.assert_close((chosen.double(), entropy.double()), wanted, **close)
    assert torch.equal(chosen, without) and torch.equal(log_sums, once_more)
    grad_chosen, grad_entropy = torch.randn(2, rows)
    total = grad_chosen.double() @ expected[0] + grad_entropy.double() @ expected[1]
    (wanted,) = torch.autograd.grad(total, leaf)
    grads = grad_chosen, entropy, grad_entropy
    found = kernels.logit_gradient_(logits.clone(), targets, 0, 0.7, log_sums, *grads)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
"""


def test_kernels_match_float64_under_the_interpreter():
    root = Path(__file__).parents[2]
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(root))
    python = need_python(None, "Triton's interpreter")
    done = subprocess.run(
        [python, "-c", COMPARISON], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
