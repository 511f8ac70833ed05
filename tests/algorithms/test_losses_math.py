"""Policy, KL, value losses and reducers against per-token loops in float64,
on ragged batches, values and gradients.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import close, make

from slime.algorithms.kl import KL_TYPES, compute_approx_kl
from slime.algorithms.off_policy import opsm_keep
from slime.algorithms.policy_loss import (
    compute_cispo_loss,
    compute_gspo_kl,
    compute_opsm_mask,
    compute_policy_loss,
    sequence_kl,
)
from slime.algorithms.reduce import (
    REDUCTIONS,
    reduction_weights,
    weighted_sum,
)
from slime.algorithms.value_loss import compute_value_loss

ragged = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def batch(lengths, seed):
    generator = torch.Generator().manual_seed(seed)

    def per_sample(scale=0.4):
        return [torch.randn(n, generator=generator, dtype=torch.float64) * scale for n in lengths]

    masks = [torch.randint(0, 2, (n,), generator=generator).double() for n in lengths]
    return per_sample(), per_sample(), per_sample(1.0), masks


def segments_of(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def loop_ppo(new, old, advantage, low, high, dual):
    ratio = torch.exp(new - old)
    loss = -min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
    return min(loss, -dual * advantage) if dual and advantage < 0 else loss


@settings(max_examples=30, deadline=None)
@given(ragged, st.integers(0, 1000), st.sampled_from([None, 1.5, 3.0]))
def test_ppo_clip_matches_a_loop_over_tokens(lengths, seed, dual):
    new, old, advantages, _ = (torch.cat(x) for x in batch(lengths, seed))
    new.requires_grad_()
    got, _ = compute_policy_loss(old - new, advantages, 0.2, 0.3, dual)
    expected = torch.stack([loop_ppo(*x, 0.2, 0.3, dual) for x in zip(new, old, advantages, strict=True)])
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    # Where every token is clipped, the loop's result is made of constants: its gradient is zero, not missing.
    grads = [
        torch.autograd.grad(x.sum() + 0.0 * new.sum(), new, retain_graph=True)[0] for x in (got, expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_clip_fraction_marks_tokens_where_the_clip_decides():
    ppo_kl = -torch.log(torch.tensor([1.5, 1.5, 0.5, 1.0]))
    _, clipped = compute_policy_loss(ppo_kl, torch.tensor([1.0, -1.0, -1.0, 1.0]), 0.2, 0.2)
    assert clipped.tolist() == [1, 0, 1, 0]


def test_a_dual_clip_of_one_or_less_is_refused():
    with pytest.raises(ValueError, match="--eps-clip-c is 1"):
        compute_policy_loss(torch.zeros(1), torch.zeros(1), 0.2, 0.2, 1.0)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    new = torch.tensor([math.log(4.0), 0.0], dtype=torch.float64, requires_grad=True)
    loss, clipped = compute_cispo_loss(-new, new, torch.tensor([2.0, 3.0], dtype=torch.float64), 0.2, 0.5)
    loss.sum().backward()
    assert clipped.tolist() == [1, 0]
    assert new.grad.tolist() == pytest.approx([-1.5 * 2.0, -3.0])


@settings(max_examples=30, deadline=None)
@given(ragged, st.integers(0, 1000))
def test_gspo_uses_the_masked_mean_of_each_sequence(lengths, seed):
    new, old, _, masks = batch(lengths, seed)
    expected = compute_gspo_kl(new, old, new, masks)
    got = sequence_kl(torch.cat(old) - torch.cat(new), torch.cat(masks), segments_of(lengths), len(lengths))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    first = sum(m * (o - n) for m, o, n in zip(masks[0], old[0], new[0], strict=True)) / max(
        masks[0].sum(), 1
    )
    torch.testing.assert_close(got[0], first, rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(ragged, st.integers(0, 1000))
def test_off_policy_sequence_mask_has_one_meaning_in_both_layouts(lengths, seed):
    new, old, advantages, masks = batch(lengths, seed)
    expected, _ = compute_opsm_mask(SimpleNamespace(opsm_delta=0.05), new, old, advantages, masks)
    flat = [torch.cat(x) for x in (new, old, advantages, masks)]
    got = opsm_keep(flat[1] - flat[0], flat[2], flat[3], segments_of(lengths), len(lengths), delta=0.05)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_estimators_match_their_formula(kind):
    new = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
    d = new - base
    expected = {"k1": d, "k2": d**2 / 2}.get(kind, torch.exp(base - new) - 1 + d)
    got = compute_approx_kl(new, base, kind)
    torch.testing.assert_close(got, expected)
    # Where every token is clipped, the loop's result is made of constants: its gradient is zero, not missing.
    grads = [
        torch.autograd.grad(x.sum() + 0.0 * new.sum(), new, retain_graph=True)[0] for x in (got, expected)
    ]
    torch.testing.assert_close(*grads)


def test_low_var_kl_is_bounded_and_an_importance_ratio_multiplies():
    new, base = torch.tensor([-20.0]), torch.tensor([0.0])
    assert compute_approx_kl(new, base, "low_var_kl").item() == 10
    assert compute_approx_kl(base, new, "k1", importance_ratio=torch.tensor([0.5])).item() == 10
    with pytest.raises(ValueError, match="--kl-loss-type is 'k9'"):
        compute_approx_kl(new, base, "k9")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_estimators_and_their_gradients_stay_finite_on_runaway_tokens(kind, dtype):
    """d = log-prob - reference counts as at most 20 in size where it
    is exponentiated; k1 and k2 need no bound.
    """
    differences = [-1e4, -89.0, -20.5, -19.5, -3.0, 3.0, 19.5, 20.5, 89.0, 1e4]
    new = torch.tensor(differences, dtype=dtype, requires_grad=True)
    got = compute_approx_kl(new, torch.zeros(len(differences), dtype=dtype), kind)
    values, slopes = [], []
    for d in differences:
        inside = -20.0 <= d <= 20.0
        bounded = min(max(d, -20.0), 20.0)
        value, slope = {
            "k1": (d, 1.0),
            "k2": (d * d / 2, d),
        }.get(kind, (math.exp(-bounded) - 1 + bounded, (1 - math.exp(-bounded)) * inside))
        if kind == "low_var_kl" and abs(value) > 10:
            value, slope = math.copysign(10, value), 0.0
        values.append(value)
        slopes.append(slope)
    got.sum().backward()
    torch.testing.assert_close(got.double(), torch.tensor(values, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        new.grad.double(), torch.tensor(slopes, dtype=torch.float64), rtol=1e-5, atol=1e-5
    )


@settings(max_examples=30, deadline=None)
@given(ragged, st.integers(0, 1000), st.booleans())
def test_reducers_sum_over_rollout_means(lengths, seed, per_token):
    values, _, _, masks = batch(lengths, seed)
    rollout_of = [i // 2 for i in range(len(lengths))]  # siblings in pairs
    sums = [sum(m.sum() for m, r in zip(masks, rollout_of, strict=True) if r == own) for own in rollout_of]
    expected = 0.0
    for value, mask, total in zip(values, masks, sums, strict=True):
        for x, m in zip(value, mask, strict=True):
            expected += float(x * m / (1 if per_token else max(total, 1)))
    segments = segments_of(lengths)
    reduction = "token_mean" if per_token else "rollout_mean"
    weights = reduction_weights(reduction, torch.cat(masks), segments, torch.tensor(sums).double())
    assert float(weighted_sum(torch.cat(values), weights)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=15, deadline=None)
@given(ragged, st.integers(0, 1000))
def test_each_reduction_matches_its_loop_in_value_and_gradient(reduction, dtype, lengths, seed):
    values, _, _, masks = batch(lengths, seed)
    rollout_of = [i // 2 for i in range(len(lengths))]  # siblings in pairs
    sums = [
        float(sum(m.sum() for m, r in zip(masks, rollout_of, strict=True) if r == own)) for own in rollout_of
    ]
    expected, weights = 0.0, []
    for value, mask, total in zip(values, masks, sums, strict=True):
        divisor = {"rollout_mean": max(total, 1.0), "sample_mean": max(float(mask.sum()), 1.0)}.get(
            reduction, 1.0
        )
        divisor = 7.0 if reduction == "constant" else divisor
        for x, m in zip(value.tolist(), mask.tolist(), strict=True):
            expected += x * m / divisor
            weights.append(m / divisor)
    flat = torch.cat(values).to(dtype).requires_grad_()
    mask_sums = torch.tensor(sums, dtype=dtype)
    got = weighted_sum(
        flat, reduction_weights(reduction, torch.cat(masks), segments_of(lengths), mask_sums, constant=7.0)
    )
    got.backward()
    close(got.detach(), torch.tensor(expected, dtype=torch.float64), dtype)
    close(flat.grad, torch.tensor(weights, dtype=torch.float64), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", KL_TYPES)
@settings(max_examples=8, deadline=None)
@given(ragged, st.integers(0, 1000))
def test_kl_and_its_gradient_match_the_loop(kind, unbiased, dtype, lengths, seed):
    data = make(lengths, seed)
    leaves = [x.clone().requires_grad_() for x in data.new]
    expected = []
    for new, base, old in zip(leaves, data.reference, data.old, strict=True):
        for n, b, o in zip(new, base, old, strict=True):
            d = n - b
            term = {"k1": d, "k2": d * d / 2}.get(kind, torch.exp(b - n) - 1 + d)
            term = term * torch.exp(n - o) if unbiased else term
            expected.append(torch.clamp(term, -10, 10) if kind == "low_var_kl" else term)
    expected = torch.stack(expected)
    expected.sum().backward()
    flat = data.flat("new", dtype).requires_grad_()
    ratio = torch.exp(flat - data.flat("old", dtype)) if unbiased else None
    got = compute_approx_kl(flat, data.flat("reference", dtype), kind, ratio)
    got.sum().backward()
    close(got.detach(), expected.detach(), dtype)
    close(flat.grad, torch.cat([leaf.grad for leaf in leaves]), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=10, deadline=None)
@given(ragged, st.integers(0, 1000))
def test_value_loss_and_its_gradient_match_the_loop(dtype, lengths, seed):
    values, old, returns = (torch.cat(x) for x in batch(lengths, seed)[:3])
    leaf = values.clone().requires_grad_()
    expected = torch.stack(
        [
            torch.maximum((v - r) ** 2, (o + torch.clamp(v - o, -0.2, 0.2) - r) ** 2)
            for v, o, r in zip(leaf, old, returns, strict=True)
        ]
    )
    expected.sum().backward()
    own = values.to(dtype).requires_grad_()
    got, _ = compute_value_loss(own, old.to(dtype), returns.to(dtype), 0.2)
    got.sum().backward()
    close(got.detach(), expected.detach(), dtype)
    close(own.grad, leaf.grad, dtype)


def test_a_masked_token_contributes_nothing_even_if_it_is_nan():
    values = torch.tensor([float("nan"), 2.0], requires_grad=True)
    total = weighted_sum(values, torch.tensor([0.0, 1.0]))
    total.backward()
    assert total.item() == 2.0
    assert values.grad.tolist() == [0.0, 1.0]


def test_value_loss_takes_the_larger_of_clipped_and_plain_error():
    values, old, returns = torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 1.0])
    loss, clipped = compute_value_loss(values, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([1.8**2, 0.9**2])
    assert clipped.tolist() == [1, 0]


def test_values_that_moved_less_than_the_clip_are_not_counted_as_clipped():
    generator = torch.Generator().manual_seed(0)
    old, moves, returns = (torch.randn(1000, generator=generator) for _ in range(3))
    values = (old + 0.01 * moves).requires_grad_()
    loss, clipped = compute_value_loss(values, old, returns, 0.2)
    loss.sum().backward()
    assert clipped.sum() == 0
    assert torch.equal(values.grad, 2 * (values.detach() - returns))
