"""The loss for even use of experts against a plain loop in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.expert_balance import balance_losses


def reference(logits: torch.Tensor, chosen: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    losses, start = [], 0
    num_experts = logits.shape[1]
    for length in lengths:
        probabilities = logits[start : start + length].softmax(-1)
        total = torch.zeros((), dtype=torch.float64)
        for expert in range(num_experts):
            choices = sum(int(expert in row) for row in chosen[start : start + length].tolist())
            total = total + (choices / length) * probabilities[:, expert].mean()
        losses.append(num_experts * total)
        start += length
    return losses


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    num_experts=st.integers(2, 6),
    seed=st.integers(0, 1000),
)
def test_value_and_gradient_are_those_of_a_plain_loop(lengths, num_experts, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(
        sum(lengths), num_experts, dtype=torch.float64, generator=generator, requires_grad=True
    )
    chosen = logits.detach().topk(min(2, num_experts)).indices
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    weights = torch.rand(len(lengths), dtype=torch.float64, generator=generator)
    found = balance_losses(logits, chosen, documents, len(lengths))
    expected = torch.stack(reference(logits, chosen, lengths))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad((value * weights).sum(), logits)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    single = balance_losses(logits.detach().float(), chosen, documents, len(lengths))
    torch.testing.assert_close(single.double(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_even_use_costs_the_number_of_choices_and_one_expert_for_all_costs_their_number():
    documents = torch.zeros(4, dtype=torch.long)
    even = balance_losses(torch.zeros(4, 4), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]), documents, 1)
    alone = torch.tensor([[50.0, 0.0, 0.0, 0.0]] * 4)
    assert even.item() == pytest.approx(2.0)
    assert balance_losses(alone, torch.zeros(4, 1, dtype=torch.long), documents, 1).item() == pytest.approx(
        4.0
    )


def test_one_document_is_what_transformers_computes_for_one_layer():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))
    theirs = load_balancing_loss_func((logits,), 5, 2)
    ours = balance_losses(logits, logits.topk(2).indices, torch.zeros(7, dtype=torch.long), 1)
    assert ours.item() == pytest.approx(float(theirs), rel=1e-5)
