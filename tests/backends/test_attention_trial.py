"""An attention operator is used only where its output and its gradients are those of plain attention."""

import logging

import pytest
import torch

from slime.backends.attention import PackedDocuments, head_shape, packed_attention
from slime.backends.attention_trial import first_right, why_wrong

CPU = torch.device("cpu")


def fake_right(query, key, value, cu_seqlens, bounds, scale):
    return packed_attention(query, key, value, PackedDocuments.from_lengths(bounds.diff().tolist()), scale=scale), None


def fake_without_scale(query, key, value, cu_seqlens, bounds, scale):
    return fake_right(query, key, value, cu_seqlens, bounds, query.shape[-1] ** -0.5)


def fake_across_documents(query, key, value, cu_seqlens, bounds, scale):
    return fake_right(query, key, value, cu_seqlens, bounds[[0, -1]], scale)


def fake_wrong_backward(query, key, value, cu_seqlens, bounds, scale):
    return fake_right(query, key, 0.5 * value + 0.5 * value.detach(), cu_seqlens, bounds, scale)


def fake_missing(*_):
    raise ModuleNotFoundError("no such package")


def fake_failing(*_):
    raise AssertionError("heads of 7 are not taken")


@pytest.mark.parametrize(("ratio", "width"), [(1, 32), (4, 16)])
def test_an_operator_that_computes_plain_attention_is_right(ratio, width):
    assert why_wrong(fake_right, ratio, width, CPU) is None


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        (fake_without_scale, "its output"),
        (fake_across_documents, "its output"),
        (fake_wrong_backward, "its value gradient"),
        (fake_failing, "AssertionError: heads of 7"),
    ],
)
def test_a_wrong_operator_is_passed_over_and_the_log_says_why(operator, reason, caplog):
    with caplog.at_level(logging.WARNING):
        assert first_right({"this one": operator, "next": fake_right}, 2, 16, CPU) is fake_right
    assert "this one is not used" in caplog.text and reason in caplog.text


def test_a_package_that_is_not_installed_is_passed_over_in_silence(caplog):
    with caplog.at_level(logging.WARNING):
        assert first_right({"missing": fake_missing}, 2, 16, CPU) is None
    assert not caplog.text


def test_the_shape_of_heads_is_read_from_the_config():
    from transformers import LlamaConfig, Qwen3Config

    assert head_shape(Qwen3Config(num_attention_heads=16, num_key_value_heads=8, head_dim=128)) == (2, 128)
    assert head_shape(LlamaConfig(hidden_size=256, num_attention_heads=8, num_key_value_heads=8)) == (1, 32)
