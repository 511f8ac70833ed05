"""Every policy loss against a loop over samples and tokens: values and
gradients, float64 to 1e-10 and fp32 to 1e-5.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from ragged_batches import close, lengths_strategy, make, seeds

from slime.algorithms.policy_loss import PolicyInputs, PolicyOptions, compute_policy_terms
from slime.catalog.policy_losses import POLICY_LOSSES

OPTIONS = PolicyOptions(
    eps_clip=0.2,
    eps_clip_high=0.3,
    eps_clip_c=2.0,
    sapo_tau_pos=1.0,
    sapo_tau_neg=1.7,
    dppo_delta=0.05,
)


def clamp(x, low, high):
    return torch.clamp(x, low, high)


def exp(log_ratio):
    """Of a log-ratio, which counts as at most 20 in size."""
    return torch.exp(clamp(log_ratio, -20.0, 20.0))


def ppo_token(ratio, advantage):
    loss = -torch.minimum(ratio * advantage, clamp(ratio, 0.8, 1.3) * advantage)
    if advantage < 0:
        loss = torch.minimum(loss, -2.0 * advantage)
    return loss


def masked_mean(values, mask):
    total = sum(m for m in mask)
    return sum(v * m for v, m in zip(values, mask, strict=True)) / max(float(total), 1.0)


def ppo(new, old, adv, mask):
    return [ppo_token(exp(n - o), a) for n, o, a in zip(new, old, adv, strict=True)]


def gspo(new, old, adv, mask):
    ratio = exp(masked_mean([n - o for n, o in zip(new, old, strict=True)], mask))
    return [ppo_token(ratio, a) for a in adv]


def cispo(new, old, adv, mask):
    return [-clamp(exp(n - o).detach(), 0.8, 1.3) * a * n for n, o, a in zip(new, old, adv, strict=True)]


def sapo(new, old, adv, mask):
    losses = []
    for n, o, a in zip(new, old, adv, strict=True):
        tau = 1.0 if a > 0 else 1.7
        losses.append(-(4 / tau) * torch.sigmoid(tau * (exp(n - o) - 1)) * a)
    return losses


def gmpo(new, old, adv, mask):
    bounded = []
    for n, o, a in zip(new, old, adv, strict=True):
        d = n - o
        bounded.append(clamp(d, -1e9, 0.3) if a > 0 else clamp(d, -0.2, 1e9))
    ratio = exp(masked_mean(bounded, mask))
    return [-ratio * a for a in adv]


def dppo(divergence):
    def loss(new, old, adv, mask):
        losses = []
        for n, o, a in zip(new, old, adv, strict=True):
            ratio, p, q = exp(n - o), torch.exp(o).item(), torch.exp(n).item()
            away = (a > 0 and ratio > 1) or (a < 0 and ratio < 1)
            losses.append(-ratio * a * (0.0 if away and divergence(p, q) > 0.05 else 1.0))
        return losses

    return loss


def tv(p, q):
    return abs(p - q)


def kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


REFERENCES = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv": dppo(tv),
    "dppo_kl": dppo(kl),
}


def inputs(data, dtype):
    return PolicyInputs(
        log_probs=data.flat("new", dtype).requires_grad_(),
        old_log_probs=data.flat("old", dtype),
        advantages=data.flat("advantages", dtype),
        mask=data.flat("masks", dtype),
        segments=data.segments,
        num_samples=len(data.new),
    )


def test_every_loss_has_a_reference():
    assert REFERENCES.keys() == POLICY_LOSSES.keys()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=12, deadline=None)
@given(lengths=lengths_strategy, seed=seeds)
def test_loss_and_gradient_match_the_loop(name, dtype, lengths, seed):
    data = make(lengths, seed)
    leaves = [x.clone().requires_grad_() for x in data.new]
    expected = torch.stack(
        [
            loss
            for sample in zip(leaves, data.old, data.advantages, data.masks, strict=True)
            for loss in REFERENCES[name](*sample)
        ]
    )
    x = inputs(data, dtype)
    got = compute_policy_terms(name, x, OPTIONS).loss
    close(got, expected, dtype)
    mask = data.flat("masks")
    (expected * mask).sum().backward()
    (got * mask.to(dtype)).sum().backward()
    close(x.log_probs.grad, torch.cat([leaf.grad for leaf in leaves]), dtype)


RUNAWAY = (-300.0, -89.0, -20.5, -19.5, 19.5, 20.5, 89.0, 300.0)


def runaway(log_ratios, advantage):
    """Samples of two tokens; the log-ratio of the first is given: a token that became likely, or unlikely."""
    data = make([2] * len(log_ratios), 1)
    for i, d in enumerate(log_ratios):
        if d > 0:
            data.old[i][0] = data.new[i][0] - d
        else:
            data.new[i][0] = data.old[i][0] + d
        data.masks[i], data.advantages[i] = torch.ones(2).double(), torch.full((2,), advantage).double()
    return data


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("advantage", [-1.5, 0.5])
@pytest.mark.parametrize("name", REFERENCES)
def test_runaway_tokens_count_as_a_log_ratio_of_twenty(name, advantage, dtype):
    data = runaway(RUNAWAY, advantage)
    leaves = [x.clone().requires_grad_() for x in data.new]
    samples = zip(leaves, data.old, data.advantages, data.masks, strict=True)
    expected = torch.stack([loss for sample in samples for loss in REFERENCES[name](*sample)])
    x = inputs(data, dtype)
    got = compute_policy_terms(name, x, OPTIONS).loss
    torch.testing.assert_close(got.double(), expected, rtol=3e-5, atol=1e-6)
    expected.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(
        x.log_probs.grad.double(), torch.cat([leaf.grad for leaf in leaves]), rtol=3e-5, atol=1e-6
    )


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("name", REFERENCES)
def test_no_loss_and_no_gradient_is_infinite_in_single_precision(name, dual):
    """A negative advantage and a log-ratio above 88 was infinite without the dual clip."""
    for advantage in (-1.0, 1.0):
        x = inputs(runaway((1e4, -1e4, 100.0, -100.0, 40.0), advantage), torch.float32)
        terms = compute_policy_terms(name, x, replace(OPTIONS, eps_clip_c=dual))
        terms.loss.sum().backward()
        assert terms.loss.isfinite().all() and terms.ppo_kl.isfinite().all()
        assert x.log_probs.grad.isfinite().all()


@pytest.mark.parametrize("name", REFERENCES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name):
    data = make([4, 1, 3], 5)
    data.old = [x.clone() for x in data.new]
    data.masks = [torch.ones_like(x) for x in data.masks]
    x = inputs(data, torch.float64)
    compute_policy_terms(name, x, OPTIONS).loss.sum().backward()
    close(x.log_probs.grad, -data.flat("advantages"))


@pytest.mark.parametrize("name", REFERENCES)
def test_a_sample_of_one_token_and_a_mask_of_zeros_are_fine(name):
    data = make([1, 1], 3)
    data.masks = [torch.zeros(1).double(), torch.ones(1).double()]
    x = inputs(data, torch.float64)
    terms = compute_policy_terms(name, x, OPTIONS)
    (terms.loss * x.mask).sum().backward()
    assert terms.loss.isfinite().all()
    assert x.log_probs.grad[0] == 0


def test_masked_tokens_never_move_a_sequence_ratio():
    data = make([5], 1)
    data.masks = [torch.tensor([1.0, 0, 1, 0, 1]).double()]
    for name in ("gspo", "gmpo"):
        before = compute_policy_terms(name, inputs(data, torch.float64), OPTIONS).loss
        data.old[0][1] -= 3.0
        torch.testing.assert_close(
            compute_policy_terms(name, inputs(data, torch.float64), OPTIONS).loss, before
        )
        data.old[0][1] += 3.0
