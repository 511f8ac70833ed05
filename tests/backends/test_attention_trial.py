"""An attention operator is used only where its output and its gradients are those of plain attention."""

import itertools
import logging

import pytest
import torch
from torch import Tensor

from slime.backends.attention import trial
from slime.backends.attention.attention_operator import NotInstalled, packed_operator
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.packed_documents import head_shape, packed_attention
from slime.backends.attention.trial import first_right, unobserved, why_wrong

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_trial(monkeypatch):
    """A document of 1,100 tokens tells GPU kernels apart, and takes a CPU seconds."""
    monkeypatch.setattr(trial, "_LENGTHS", (40, 110, 24, 1))
    monkeypatch.setattr(trial, "_HEADS", 8)


def fake_right(query, key, value, cu_seqlens, bounds, scale):
    return packed_attention(
        query, key, value, PackedDocuments.from_lengths(bounds.diff().tolist()), scale=scale
    ), None


def fake_without_scale(query, key, value, cu_seqlens, bounds, scale):
    return fake_right(query, key, value, cu_seqlens, bounds, query.shape[-1] ** -0.5)


def fake_across_documents(query, key, value, cu_seqlens, bounds, scale):
    return fake_right(query, key, value, cu_seqlens, bounds[[0, -1]], scale)


def fake_wrong_backward(query, key, value, cu_seqlens, bounds, scale):
    return fake_right(query, key, 0.5 * value + 0.5 * value.detach(), cu_seqlens, bounds, scale)


def fake_missing(*_):
    raise NotInstalled("a package")


def fake_half_installed(*_):
    raise ModuleNotFoundError("No module named 'cutlass'")


def fake_failing(*_):
    raise AssertionError("heads of 7 are not taken")


@pytest.mark.parametrize(("ratio", "width"), [(1, 32), (4, 16)])
def test_an_operator_that_computes_plain_attention_is_right(ratio, width):
    assert why_wrong(fake_right, ratio, width, CPU) is None


def plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    kept: Tensor,
    cu_seqlens: Tensor,
    bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """By hand, document by document: inside an operator torch records nothing."""
    ratio, found = query.shape[1] // key.shape[1], []
    for start, end in itertools.pairwise(bounds.tolist()):
        g, q, k, v = (x[start:end].float().transpose(0, 1) for x in (grad, query, key, value))
        k, v = k.repeat_interleave(ratio, 0), v.repeat_interleave(ratio, 0)
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        probs = (q @ k.mT * scale).masked_fill(future, float("-inf")).softmax(-1)
        inner = g @ v.mT
        scores = probs * (inner - (probs * inner).sum(-1, keepdim=True)) * scale
        each = scores @ k, scores.mT @ q, probs.mT @ g
        groups = (1, ratio, ratio)
        found.append(
            [x.unflatten(0, (-1, n)).sum(1).transpose(0, 1) for x, n in zip(each, groups, strict=True)]
        )
    return tuple(torch.cat(parts).to(query.dtype) for parts in zip(*found, strict=True))


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out, _ = fake_right(query, key, value, cu_seqlens, bounds, scale)
    return out, query.new_zeros((2, query.shape[0]), dtype=torch.float32)


def test_two_functions_make_an_operator_that_torch_accepts_and_a_trial_finds_right():
    operator = packed_operator(
        "plain_for_test", plain_forward, plain_backward, lambda query, *_: (2, query.shape[0])
    )
    assert why_wrong(operator, 2, 16, CPU) is None
    bounds = torch.tensor([0, 3, 7])
    parts = [torch.randn(7, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    torch.library.opcheck(operator, (*parts, bounds.int(), bounds, 0.3))


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        (fake_without_scale, "its output"),
        (fake_across_documents, "its output"),
        (fake_wrong_backward, "its gradient of the value"),
        (fake_failing, "AssertionError: heads of 7"),
        (fake_half_installed, "No module named 'cutlass'"),
    ],
)
def test_a_wrong_operator_is_passed_over_and_the_log_says_why(operator, reason, caplog):
    with caplog.at_level(logging.WARNING):
        assert first_right({"this one": operator, "next": fake_right}, 2, 16, CPU) is fake_right
    assert "does not use this one" in caplog.text and reason in caplog.text


def test_a_package_that_is_not_installed_is_passed_over_in_silence(caplog):
    with caplog.at_level(logging.WARNING):
        assert first_right({"missing": fake_missing}, 2, 16, CPU) is None
    assert not caplog.text


def test_hooks_on_saved_tensors_see_nothing_of_a_trial():
    seen = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x),
        torch.no_grad(),
    ):
        assert unobserved(lambda: first_right({"right": fake_right}, 2, 16, CPU)) is fake_right
    assert seen == []


def test_the_shape_of_heads_is_read_from_the_config():
    from transformers import LlamaConfig, Qwen3Config

    assert head_shape(Qwen3Config(num_attention_heads=16, num_key_value_heads=8, head_dim=128)) == (2, 128)
    assert head_shape(LlamaConfig(hidden_size=256, num_attention_heads=8, num_key_value_heads=8)) == (1, 32)
