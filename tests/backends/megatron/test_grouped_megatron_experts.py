"""Grouped experts train as Megatron's own do, alone and where ranks share the experts."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_helpers import GRPO, in_processes, make_family, megatron_args, train

pytestmark = pytest.mark.megatron


def _both_ways(rank: int, world_size: int, model: str, settings: dict) -> dict:
    from slime.backends.megatron import create_backend
    from slime.backends.megatron.experts import GroupedExperts

    results = {}
    for grouped in (False, True):
        GroupedExperts.on_any_device = grouped
        calls = []
        compute = GroupedExperts.compute
        GroupedExperts.compute = lambda *args, kept=compute, seen=calls: seen.append(1) or kept(*args)
        result = train(
            create_backend, megatron_args(model, **(GRPO | {"lr": 0.01} | settings)), rank, world_size
        )
        GroupedExperts.compute = compute
        result.pop("backend")
        results[grouped] = result | {"calls": len(calls)}
    return results


@pytest.mark.parametrize(
    ("kind", "ranks", "settings"),
    [("qwen3_moe", 1, {}), ("qwen3_moe", 2, {"ep": 2})],
)
def test_grouped_experts_train_like_megatrons_own(tmp_path, kind, ranks, settings):
    results = in_processes(ranks, _both_ways, tmp_path, make_family(tmp_path / "model", kind), settings)
    own, grouped = results[False], results[True]
    assert own["calls"] == 0 < grouped["calls"]
    for expected, found in zip(own["steps"], grouped["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, tensor in own["after"].items():
        # Adam makes a step of 0.01 of any gradient, also of one that is all rounding.
        torch.testing.assert_close(grouped["after"][name], tensor, rtol=1e-4, atol=5e-4, msg=name)
