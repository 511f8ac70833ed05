"""Losses over preference pairs and the sampled reverse KL: values and
gradients against the obvious loop in float64.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.distillation import sampled_reverse_kl, subtract_reverse_kl
from slime.algorithms.preference import compute_bradley_terry_loss, compute_dpo_loss

PRECISIONS = {torch.float64: dict(rtol=1e-10, atol=1e-10), torch.float32: dict(rtol=1e-5, atol=1e-6)}
sums = st.lists(st.tuples(*[st.floats(-30, 5)] * 4), min_size=1, max_size=6)


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def columns(rows, dtype):
    # Values that fp32 holds exactly, so that both precisions see the same numbers.
    return [torch.tensor(column, dtype=torch.float32).to(dtype) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("dtype", PRECISIONS)
@settings(deadline=None, max_examples=40)
@given(rows=sums, beta=st.sampled_from([0.1, 1.0]))
def test_dpo_and_its_gradient_match_the_loop(dtype, rows, beta):
    chosen, rejected, ref_chosen, ref_rejected = columns(rows, dtype)
    chosen.requires_grad_()
    rejected.requires_grad_()
    loss, good, bad = compute_dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
    loss.sum().backward()
    for i, (c, r, rc, rr) in enumerate(zip(*(x.tolist() for x in columns(rows, torch.float64)), strict=True)):
        margin = beta * ((c - rc) - (r - rr))
        value, slope = softplus(-margin), -beta * sigmoid(-margin)
        found = torch.stack([loss[i].detach(), good[i], bad[i], chosen.grad[i], rejected.grad[i]]).double()
        expected = torch.tensor([value, beta * (c - rc), beta * (r - rr), slope, -slope], dtype=torch.float64)
        torch.testing.assert_close(found, expected, **PRECISIONS[dtype])


@pytest.mark.parametrize("dtype", PRECISIONS)
@settings(deadline=None, max_examples=40)
@given(rows=sums)
def test_bradley_terry_and_its_gradient_match_the_loop(dtype, rows):
    chosen, rejected, margin, _ = columns(rows, dtype)
    chosen.requires_grad_()
    loss = compute_bradley_terry_loss(chosen, rejected, margin)
    loss.sum().backward()
    for i, (c, r, m, _) in enumerate(zip(*(x.tolist() for x in columns(rows, torch.float64)), strict=True)):
        found = torch.stack([loss[i].detach(), chosen.grad[i]]).double()
        expected = torch.tensor([softplus(-(c - r - m)), -sigmoid(-(c - r - m))], dtype=torch.float64)
        torch.testing.assert_close(found, expected, **PRECISIONS[dtype])


def test_the_reverse_kl_is_subtracted_token_by_token():
    student = [torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64)]
    teacher = [torch.tensor([-1.5, -0.5], dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64)]
    kl = sampled_reverse_kl(student, teacher)
    advantages = subtract_reverse_kl([torch.ones(2).double(), torch.zeros(1).double()], kl, 2.0)
    assert [x.tolist() for x in advantages] == [[0.0, 4.0], [0.0]]
