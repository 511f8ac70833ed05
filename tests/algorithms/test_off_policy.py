"""Importance weights, rejection, sequence masks and mismatch
metrics against loops over samples and tokens.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import close, lengths_strategy, make, seeds

from slime.algorithms.off_policy import (
    WEIGHT_MODES,
    TokenLayout,
    icepop_function,
    importance_ratios,
    importance_weights,
    mismatch_metrics,
    opsm_keep,
    rejection,
)
from slime.arguments.groups.off_policy import LEVELS

LOW, HIGH = 0.7, 1.5


def layout_of(data, dtype=torch.float64):
    return TokenLayout(data.flat("masks", dtype), data.segments, len(data.new))


def loop_ratios(data, level):
    """Per sample a list of ratios of trainer to engine policy, in plain floats."""
    result = []
    for train, rollout, mask in zip(data.old, data.rollout, data.masks, strict=True):
        logs = [float(t - r) for t, r in zip(train, rollout, strict=True)]
        kept = [x for x, m in zip(logs, mask, strict=True) if m]
        whole = sum(kept) if level == "sequence" else sum(kept) / max(len(kept), 1)
        result.append([math.exp(x) for x in logs] if level == "token" else [math.exp(whole)] * len(logs))
    return result


def loop_weight(ratio, mode):
    if mode == "clip":
        return min(max(ratio, LOW), HIGH)
    if mode == "truncate":
        return min(ratio, HIGH)
    return ratio if LOW <= ratio <= HIGH else 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", WEIGHT_MODES)
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=8, deadline=None)
@given(lengths=lengths_strategy, seed=seeds)
def test_weights_match_the_loop(level, mode, dtype, lengths, seed):
    data = make(lengths, seed)
    ratios = [r for sample in loop_ratios(data, level) for r in sample]
    log_ratio = (data.flat("old", dtype) - data.flat("rollout", dtype)).requires_grad_()
    got = importance_weights(log_ratio, layout_of(data, dtype), level=level, mode=mode, low=LOW, high=HIGH)
    assert not got.weights.requires_grad
    close(got.weights, torch.tensor([loop_weight(r, mode) for r in ratios], dtype=torch.float64), dtype)
    close(got.metrics["tis"], torch.tensor(ratios, dtype=torch.float64), dtype)
    close(got.metrics["tis_abs"], torch.tensor([abs(r - 1) for r in ratios], dtype=torch.float64), dtype)
    expected = [loop_weight(r, mode) != r for r in ratios]
    if dtype == torch.float64:
        assert got.metrics["tis_clipfrac"].bool().tolist() == expected


@pytest.mark.parametrize("veto", [None, 0.5])
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=12, deadline=None)
@given(lengths=lengths_strategy, seed=seeds)
def test_rejection_matches_the_loop(level, veto, lengths, seed):
    data = make(lengths, seed)
    expected = []
    for ratios, tokens, mask in zip(
        loop_ratios(data, level), loop_ratios(data, "token"), data.masks, strict=True
    ):
        vetoed = veto is not None and any(t < veto and m for t, m in zip(tokens, mask, strict=True))
        expected += [float(LOW <= r <= HIGH and not vetoed) for r in ratios]
    log_ratio = data.flat("old") - data.flat("rollout")
    got = rejection(log_ratio, layout_of(data), level=level, low=LOW, high=HIGH, veto=veto)
    assert got.keep.tolist() == expected
    assert (got.weights == 1).all()


def test_tokens_that_are_not_trained_never_change_a_sequence():
    data = make([4], 2)
    data.masks = [torch.tensor([1.0, 1, 0, 1]).double()]
    log_ratio = data.flat("old") - data.flat("rollout")
    wild = log_ratio.clone()
    wild[2] = float("nan")
    for level in ("sequence", "geometric"):
        before, after = (importance_ratios(x, layout_of(data), level) for x in (log_ratio, wild))
        assert torch.equal(before, after)


@pytest.mark.parametrize("log_ratios", [(300.0, 200.0), (-300.0, -200.0), (1e4, -1e4), (19.0, 19.0)])
def test_ratios_never_overflow(log_ratios):
    """Whatever is made of them: weights, rejection, metrics, and IcePop as a plug-in."""
    layout = TokenLayout(torch.ones(2), torch.zeros(2, dtype=torch.int64), 1)
    log_ratio = torch.tensor(log_ratios)
    train, rollout = log_ratio.clamp(max=0.0), (-log_ratio).clamp(max=0.0)
    for level in LEVELS:
        whole = {
            "token": log_ratios,
            "sequence": [sum(log_ratios)] * 2,
            "geometric": [sum(log_ratios) / 2] * 2,
        }[level]
        expected = [math.exp(min(max(x, -20.0), 20.0)) for x in whole]
        assert importance_ratios(log_ratio, layout, level).tolist() == pytest.approx(expected, rel=1e-5)
        for mode in WEIGHT_MODES:
            found = importance_weights(log_ratio, layout, level=level, mode=mode, low=LOW, high=HIGH)
            assert all(x.isfinite().all() for x in (found.weights, *found.metrics.values()))
        found = rejection(log_ratio, layout, level=level, low=LOW, high=HIGH, veto=1e-3)
        assert all(x.isfinite().all() for x in (found.keep, *found.metrics.values()))
    assert all(x.isfinite().all() for x in mismatch_metrics(train, rollout, layout).values())
    args = SimpleNamespace(tis_clip_low=LOW, tis_clip=HIGH)
    lists = dict(train_log_probs=[train], rollout_log_probs=[rollout], loss_masks=[torch.ones(2)])
    loss, _, metrics = icepop_function(args, pg_loss=torch.ones(2), **lists)
    assert all(x.isfinite().all() for x in (loss, *metrics.values()))


def test_an_unknown_level_is_an_error():
    layout = TokenLayout(torch.ones(2), torch.zeros(2, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="level 'word'"):
        importance_ratios(torch.zeros(2), layout, "word")


@settings(max_examples=20, deadline=None)
@given(lengths=lengths_strategy, seed=seeds, delta=st.sampled_from([0.0, 0.05, 0.3]))
def test_sequence_mask_matches_the_loop(lengths, seed, delta):
    data = make(lengths, seed)
    expected = []
    for new, old, advantages, mask in zip(data.new, data.old, data.advantages, data.masks, strict=True):
        drift = sum(float((o - n) * m) for n, o, m in zip(new, old, mask, strict=True)) / max(
            float(mask.sum()), 1.0
        )
        expected += [0.0 if a < 0 and drift > delta else 1.0 for a in advantages.tolist()]
    got = opsm_keep(
        data.flat("old") - data.flat("new"),
        data.flat("advantages"),
        data.flat("masks"),
        data.segments,
        len(lengths),
        delta=delta,
    )
    assert got.tolist() == expected


@settings(max_examples=15, deadline=None)
@given(lengths=lengths_strategy, seed=seeds)
def test_mismatch_metrics_match_the_loop(lengths, seed):
    data = make(lengths, seed)
    got = mismatch_metrics(data.flat("old"), data.flat("rollout"), layout_of(data))
    tokens = torch.tensor([r for sample in loop_ratios(data, "token") for r in sample], dtype=torch.float64)
    sequences = torch.tensor(
        [r for sample in loop_ratios(data, "sequence") for r in sample], dtype=torch.float64
    )
    close(got["mis_kl"], -torch.log(tokens))
    close(got["mis_k3_kl"], tokens - 1 - torch.log(tokens))
    close(got["mis_chi2_token"], tokens**2 - 1)
    close(got["mis_chi2_seq"], sequences**2 - 1)
    for name, values in (("mis_training_ppl", data.old), ("mis_rollout_ppl", data.rollout)):
        expected = []
        for value, mask in zip(values, data.masks, strict=True):
            mean = sum(float(v * m) for v, m in zip(value, mask, strict=True)) / max(float(mask.sum()), 1.0)
            expected += [math.exp(-mean)] * len(value)
        close(got[name], torch.tensor(expected, dtype=torch.float64))


def test_icepop_as_a_plug_in_is_the_token_mask():
    data = make([3, 2], 4)
    args = SimpleNamespace(tis_clip=HIGH, tis_clip_low=LOW)
    loss = torch.rand(5, dtype=torch.float64)
    got, masks, metrics = icepop_function(
        args,
        pg_loss=loss,
        train_log_probs=data.old,
        rollout_log_probs=data.rollout,
        loss_masks=data.masks,
        total_lengths=[4, 3],
        response_lengths=[3, 2],
    )
    log_ratio = data.flat("old") - data.flat("rollout")
    own = importance_weights(log_ratio, layout_of(data), level="token", mode="mask", low=LOW, high=HIGH)
    torch.testing.assert_close(got, loss * own.weights)
    assert len(masks) == 2
    assert metrics.keys() == own.metrics.keys()


def test_decoupled_ppo_is_the_clipped_loss_times_the_weight():
    """behaviour b, proximal p, current c: (p/b) x clip(c/p), whose gradient on policy is that of c/b."""
    b, p, a = math.log(0.2), math.log(0.3), 1.5
    c = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    layout = TokenLayout(torch.ones(1), torch.zeros(1, dtype=torch.int64), 1)
    weight = importance_weights(
        torch.tensor([p - b], dtype=torch.float64), layout, level="token", mode="truncate", low=0.0, high=9.0
    ).weights[0]
    (-weight * torch.exp(c - p) * a).backward()
    assert c.grad.item() == pytest.approx(-math.exp(p - b) * a)
