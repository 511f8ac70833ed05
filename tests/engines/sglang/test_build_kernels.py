"""Kernels that are compiled ahead: which ones, by which call, and that nothing depends on it."""

import sys
import types

import pytest
import torch

from slime.engines.sglang import build_kernels
from slime.engines.sglang.build_kernels import Call

QWEN = {"num_attention_heads": 32, "hidden_size": 2560, "head_dim": 128, "num_key_value_heads": 8}


def arguments(config: dict, ranks: int = 1, cache_bytes: int = 2) -> dict[str, tuple]:
    found = build_kernels.kernels(config, torch.bfloat16, torch.int64, ranks, cache_bytes)
    return {name: calls[-1].arguments for name, calls in found.items()}


def test_a_config_says_what_kernels_are_built_for():
    wanted = arguments(QWEN)
    assert wanted["query and key norm"] == (128, torch.bfloat16)
    assert wanted["rotary positions"] == (True, 128, torch.bfloat16)
    assert wanted["key cache"] == (8 * 128 * 2,)
    assert arguments(QWEN, cache_bytes=1)["key cache"] == (8 * 128,)
    assert arguments(QWEN, ranks=4)["key cache"] == (2 * 128 * 2,)
    assert arguments(QWEN, ranks=16)["key cache"] == (128 * 2,), "a head that ranks share stands on each"
    assert arguments({"text_config": QWEN}) == wanted


def test_what_a_config_leaves_out_is_as_in_transformers():
    config = {"num_attention_heads": 16, "hidden_size": 1024, "partial_rotary_factor": 0.5}
    wanted = arguments(config)
    assert wanted["key cache"] == (1024 * 2,) and wanted["rotary positions"] == (True, 32, torch.bfloat16)


@pytest.fixture
def installed(monkeypatch):
    """A module of a package that is installed, with functions that compile nothing."""
    module = types.ModuleType("kernels_under_test")
    calls = []
    module.two = lambda a, b: calls.append((a, b))
    module.broken = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_the_form_that_the_installed_version_takes_is_called(installed):
    forms = [
        Call("no_such_module", "two", (1, 2)),
        Call("kernels_under_test", "one", (1,)),
        Call("kernels_under_test", "two", (1, 2, 3)),
        Call("kernels_under_test", "two", (1, 2)),
    ]
    told = build_kernels.build_all({"kernel": forms, "unknown": forms[:3]})
    assert installed == [(1, 2)]
    assert told["kernel"].endswith(" s") and told["unknown"] == "not in this version"


def test_a_kernel_that_cannot_be_built_keeps_no_other_from_it(installed):
    wanted = {
        "broken": [Call("kernels_under_test", "broken", ())],
        "right": [Call("kernels_under_test", "two", (1, 2))],
    }
    told = build_kernels.build_all(wanted)
    assert told["broken"].startswith("ZeroDivisionError") and installed == [(1, 2)]
