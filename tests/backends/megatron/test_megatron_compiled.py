"""Compiled layers compute what Megatron's own do, and only layers of exactly those parts are compiled."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_helpers import GRPO, in_processes, make_family, megatron_args, train

pytestmark = pytest.mark.megatron


def _both_ways(rank: int, world_size: int, model: str, settings: dict) -> dict:
    from slime.backends.megatron import create_backend
    from slime.backends.megatron.modules import compiled

    # Tracing is what can go wrong here; generating code for the machine would only take minutes.
    ordinary = torch.compile
    compiled.torch.compile = lambda function, **options: ordinary(function, **options, backend="aot_eager")
    results = {}
    for choice in (False, True):
        args = megatron_args(model, **(GRPO | {"compile": choice, "lr": 0.01} | settings))
        result = train(create_backend, args, rank, world_size)
        layers = result.pop("backend").model[0].module.decoder.layers
        results[choice] = result | {"replaced": sum("forward" in vars(layer) for layer in layers)}
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"), [("qwen3", {}), ("qwen2", {}), ("qwen3", {"lora_rank": 4}), ("qwen3_moe", {})]
)
def test_compiled_layers_train_like_megatrons_own(tmp_path, kind, settings):
    results = in_processes(1, _both_ways, tmp_path, make_family(tmp_path / "model", kind), settings)
    own, compiled = results[False], results[True]
    assert (own["replaced"], compiled["replaced"]) == (0, 4)
    for expected, found in zip(own["steps"], compiled["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, tensor in own["after"].items():
        torch.testing.assert_close(compiled["after"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def _replaced_layers(rank: int, world_size: int, model: str, settings: dict) -> dict:
    from slime.backends.megatron import create_backend

    args = megatron_args(model, compile=True, **settings)
    backend = create_backend(args, rank=rank, world_size=world_size, device="cpu")
    return {"replaced": sum("forward" in vars(layer) for layer in backend.model[0].module.decoder.layers)}


def test_attention_of_mixtures_is_compiled_too(tmp_path):
    model = make_family(tmp_path / "model", "qwen3_moe", mlp_only_layers=[0])
    assert in_processes(1, _replaced_layers, tmp_path, model, {})["replaced"] == 4


def test_cut_layers_are_left_to_megatron(tmp_path):
    model = make_family(tmp_path / "model", "qwen3")
    assert in_processes(2, _replaced_layers, tmp_path, model, {"tp": 2})["replaced"] == 0
