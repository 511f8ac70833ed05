"""Grouped experts train as Megatron's own do, alone and where ranks share the experts."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_helpers import GRPO, in_processes, make_family, megatron_args, train

pytestmark = pytest.mark.megatron


def _both_ways(rank: int, world_size: int, model: str, settings: dict) -> dict:
    from slime.backends.megatron import create_backend
    from slime.backends.megatron.modules.grouped_experts import GroupedExperts

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


def test_gradients_at_like_distances_are_one_view():
    from slime.backends.megatron.modules.grouped_experts import _one_view

    buffer = torch.zeros(100)
    parts = [buffer[10 * i + 3 : 10 * i + 9].view(2, 3) for i in range(4)]
    view = _one_view(parts)
    assert view is not None
    view.add_(torch.arange(4.0)[:, None, None].expand(4, 2, 3))
    assert [float(part.sum()) for part in parts] == [0.0, 6.0, 12.0, 18.0]
    assert _one_view(parts[::-1]) is None
    assert _one_view([parts[0], parts[1], parts[3]]) is None
    assert _one_view([parts[0], torch.zeros(2, 3)]) is None


def test_experts_of_one_buffer_are_used_in_place():
    from slime.backends.megatron.modules.grouped_experts import _Stacked

    size, count = 6, 4
    values, gradients = torch.randn(2 * size * count), torch.zeros(2 * size * count)
    weights = []
    for i in range(count):
        place = slice(2 * size * i, 2 * size * i + size)  # beside each stands the expert's other matrix
        weight = torch.nn.Parameter(torch.empty(0))
        weight.data, weight.main_grad = values[place].view(2, 3), gradients[place].view(2, 3)
        weights.append(weight)
    joined = _Stacked.apply(*weights)
    assert joined.data_ptr() == values.data_ptr()
    torch.testing.assert_close(joined.detach(), torch.stack([weight.data for weight in weights]))
    for _ in range(2):
        _Stacked.apply(*weights).backward(torch.arange(4.0)[:, None, None].expand(4, 2, 3))
    assert [float(weight.main_grad.sum()) for weight in weights] == [0.0, 12.0, 24.0, 36.0]
    assert all(weight.grad is None for weight in weights)
