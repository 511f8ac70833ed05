"""The trainer's own norm is the plain one, in both passes."""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from slime.backends.fsdp.cpu_norm import rms_norm
from slime.utils.models.norms import fuse_norms


def passes(norm, hidden, given):
    hidden = hidden.clone().requires_grad_()
    out = norm(hidden)
    return out.detach(), *torch.autograd.grad(out, (hidden, norm.weight), given)


def test_results_and_gradients_are_those_of_the_plain_norm():
    torch.manual_seed(0)
    plain = LlamaRMSNorm(96, eps=1e-5)
    plain.weight.data.normal_()
    hidden, given = 3.0 * torch.randn(2, 1, 37, 96)
    expected = passes(plain, hidden, given)
    exact = [x.float() for x in passes(plain.double(), hidden.double(), given.double())]
    plain.float()
    assert fuse_norms(plain, rms_norm) == 1
    for made, value, true in zip(passes(plain, hidden, given), expected, exact, strict=True):
        torch.testing.assert_close(made, value, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(made, true, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_differences():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: rms_norm(h, w, 1e-5), (hidden.requires_grad_(), weight.requires_grad_())
    )
