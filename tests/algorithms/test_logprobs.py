"""Chunked log-probs and entropy against log_softmax in float64, values and gradients."""

import pytest
import torch

from slime.algorithms import logprobs
from slime.algorithms.logprobs import calculate_log_probs_and_entropy, chunked_log_probs


def obvious(hidden, weight, targets, temperature):
    dist = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return dist[torch.arange(len(targets)), targets], -(dist.exp() * dist).sum(-1)


def inputs(tokens=11, width=5, vocab=17, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, vocab, (tokens,))


@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("use", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize("memory_gib", [0.0, 1.0])
def test_values_and_gradients_match_log_softmax(chunk_size, temperature, use, memory_gib):
    hidden, weight, targets = inputs()
    coefficients = torch.randn(2, len(targets), dtype=torch.float64)
    coefficients *= torch.tensor({"log_probs": [1.0, 0.0], "entropy": [0.0, 1.0], "both": [1.0, 1.0]}[use])[
        :, None
    ]

    def grads(pair):
        terms = [c @ x for c, x in zip(coefficients, pair, strict=True) if c.any()]
        return torch.autograd.grad(sum(terms), (hidden, weight))

    expected = obvious(hidden, weight, targets, temperature)
    options = dict(temperature=temperature, chunk_size=chunk_size, memory_gib=memory_gib)
    got = chunked_log_probs(hidden, weight, targets, with_entropy=True, **options)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads(got), grads(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("gib", "kept"), [(0, False), (11 * 17 * 8 / 2**30, True), (11 * 17 * 8 / 2**30 / 1.01, False)]
)
def test_logits_are_kept_only_where_they_fit_into_the_memory_given(gib, kept, monkeypatch):
    monkeypatch.setattr(logprobs, "MAX_CHUNK_ELEMENTS", 16)  # else they are one block, which is kept anyway
    hidden, weight, targets = inputs()
    log_probs, _ = chunked_log_probs(hidden, weight, targets, memory_gib=gib)
    assert (log_probs.grad_fn.kept is not None) == kept
    log_probs.sum().backward(retain_graph=True)
    assert log_probs.grad_fn.kept is None
    first = hidden.grad.clone()
    log_probs.sum().backward()  # once more, after the kept ones are gone
    torch.testing.assert_close(hidden.grad, 2 * first, rtol=1e-12, atol=1e-12)


def test_what_is_one_block_is_kept_on_a_cpu_and_its_rows_may_be_taken_one_by_one(monkeypatch):
    monkeypatch.setattr(logprobs, "_CACHED_ELEMENTS", 1)
    hidden, weight, targets = inputs()
    results = []
    for chunk_size in (-1, 4):
        log_probs, entropy = chunked_log_probs(
            hidden, weight, targets, temperature=0.7, chunk_size=chunk_size, with_entropy=True
        )
        assert (log_probs.grad_fn.kept is not None) == (chunk_size == -1)
        gradients = torch.autograd.grad((log_probs + entropy).sum(), (hidden, weight))
        results.append((log_probs, entropy, *gradients))
    for kept, computed_again in zip(*results, strict=True):
        torch.testing.assert_close(kept, computed_again, rtol=1e-12, atol=1e-12)


def test_bf16_inputs_give_fp32_log_probs():
    hidden, weight, targets = inputs(dtype=torch.bfloat16)
    log_probs, _ = chunked_log_probs(hidden, weight, targets)
    assert log_probs.dtype == torch.float32
    log_probs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_no_tokens_give_no_log_probs_but_a_gradient_of_zero():
    hidden, weight, targets = inputs(tokens=0)
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, with_entropy=True)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("chunk_size", [-1, 3])
def test_log_probs_of_existing_logits(chunk_size):
    hidden, weight, targets = inputs()
    expected = obvious(hidden, weight, targets, 1.0)
    log_probs, entropy = calculate_log_probs_and_entropy(
        hidden @ weight.T, targets, None, with_entropy=True, chunk_size=chunk_size
    )
    torch.testing.assert_close((log_probs.squeeze(-1), entropy), expected, rtol=1e-10, atol=1e-10)


def test_a_keep_mask_renormalises_the_log_prob_and_always_keeps_the_sampled_token():
    logits = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    keep = torch.tensor([[True, False, False]])
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits, torch.tensor([1]), None, with_entropy=True, log_prob_keep_mask=keep
    )
    assert log_probs.item() == pytest.approx(torch.log_softmax(logits[0, :2], -1)[1].item())
    assert entropy.item() == pytest.approx(torch.distributions.Categorical(logits=logits).entropy().item())
