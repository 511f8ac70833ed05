"""FP8 blocks: the error of a value is bounded, names and dtypes are those of FP8 checkpoints on the hub."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slime.utils.models.fp8_blocks import (
    FP8,
    LARGEST,
    dequantize_blocks,
    dequantize_part,
    quantize_blocks,
    uniform_noise,
)
from slime.weight_sync.fp8 import Fp8Format, checkpoint_format, quantize_named, quantize_state, served_config

BLOCK = (128, 128)
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def reference(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The factor of every value in float64, block by block."""
    exact = weight.double()
    factors = torch.ones_like(exact)
    for i in range(0, exact.shape[0], block[0]):
        for j in range(0, exact.shape[1], block[1]):
            largest = exact[i : i + block[0], j : j + block[1]].abs().max()
            if largest > 0:
                factors[i : i + block[0], j : j + block[1]] = largest / LARGEST
    return factors


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    block=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    spread=st.floats(0.0, 6.0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_a_value_is_off_by_at_most_half_a_step_of_its_block(rows, columns, block, spread, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(rows, columns, generator=generator) * spread
    weight = (torch.randn(rows, columns, generator=generator) * size.exp()).to(dtype)
    values, scale = quantize_blocks(weight, block)
    assert values.dtype == FP8 and values.shape == weight.shape and scale.dtype == torch.float32
    back = dequantize_blocks(values, scale, block, torch.float64)
    exact = weight.double()
    bound = torch.maximum(exact.abs() * 2.0**-4, reference(weight, block) * 2.0**-10)
    assert ((back - exact).abs() <= bound * (1 + 1e-6)).all()


def test_the_bound_is_no_looser_than_the_format():
    """A value between two neighbours reaches the bound: a coarser format would fail the test above."""
    weight = torch.tensor([[LARGEST, 17.0]])  # neighbours 16 and 18
    values, scale = quantize_blocks(weight, (1, 2))
    back = dequantize_blocks(values, scale, (1, 2), torch.float64)
    assert (back - weight.double()).abs().max() == 1.0


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_what_is_fp8_already_comes_back_bit_for_bit(powers_of_two):
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    values, scale = quantize_blocks(weight, BLOCK, powers_of_two=powers_of_two)
    again, scale_again = quantize_blocks(
        dequantize_blocks(values, scale, BLOCK, torch.float32), BLOCK, powers_of_two=powers_of_two
    )
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    torch.testing.assert_close(scale_again, scale, rtol=1e-6, atol=0)


def test_factors_of_powers_of_two_are_the_next_ones_up():
    weight = torch.tensor([[448.0, 449.0, 1.0, 0.0]])
    _, scale = quantize_blocks(weight, (1, 1), powers_of_two=True)
    assert scale.tolist() == [[1.0, 2.0, 2.0**-8, 1.0]]


def test_blocks_of_zeros_and_of_tiny_values_stay_finite():
    weight = torch.tensor([[0.0, 0.0, 1e-44, -3e38]])
    values, scale = quantize_blocks(weight, (1, 2))
    back = dequantize_blocks(values, scale, (1, 2), torch.float64)
    assert scale.isfinite().all() and back.isfinite().all()
    assert back[0, :2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(bad):
    weight = torch.ones(4, 4)
    weight[1, 2] = bad
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight holds NaN or infinite"):
        list(quantize_state([("model.layers.0.mlp.up_proj.weight", weight)], CONFIG))


# Name -> (dtype, shape) as in the dense and the expert checkpoints of Qwen3 in FP8, at other sizes.
DENSE = {
    "model.embed_tokens.weight": (torch.bfloat16, (320, 256)),
    "model.layers.0.input_layernorm.weight": (torch.bfloat16, (256,)),
    "model.layers.0.self_attn.q_proj.weight": (FP8, (512, 256)),
    "model.layers.0.self_attn.q_proj.weight_scale_inv": (torch.float32, (4, 2)),
    "model.layers.0.self_attn.q_norm.weight": (torch.bfloat16, (64,)),
    "model.layers.0.self_attn.k_proj.weight": (FP8, (192, 256)),
    "model.layers.0.self_attn.k_proj.weight_scale_inv": (torch.float32, (2, 2)),
    "model.layers.0.self_attn.k_proj.bias": (torch.bfloat16, (192,)),
    "model.layers.0.mlp.down_proj.weight": (FP8, (256, 640)),
    "model.layers.0.mlp.down_proj.weight_scale_inv": (torch.float32, (2, 5)),
    "model.norm.weight": (torch.bfloat16, (256,)),
    "lm_head.weight": (torch.bfloat16, (320, 256)),
}
EXPERTS = {
    "model.layers.1.mlp.gate.weight": (torch.bfloat16, (8, 256)),
    "model.layers.1.mlp.experts.0.gate_proj.weight": (FP8, (128, 256)),
    "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv": (torch.float32, (1, 2)),
    "model.layers.1.mlp.shared_expert_gate.weight": (torch.bfloat16, (1, 256)),
}


@pytest.mark.parametrize("checkpoint", [DENSE, EXPERTS])
def test_names_dtypes_and_shapes_are_those_of_fp8_checkpoints(checkpoint):
    plain = [
        (name, torch.randn(shape).bfloat16())
        for name, (_, shape) in checkpoint.items()
        if not name.endswith("_scale_inv")
    ]
    made = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in quantize_state(plain, CONFIG)}
    assert made == checkpoint


def test_modules_that_the_config_excludes_stay_as_they_are():
    config = {
        **CONFIG,
        "modules_to_not_convert": ["model.layers.1", "o_proj", r"model\.layers\.\d+\.mlp\.up_proj"],
    }
    how = Fp8Format.from_config(config)
    matrix = torch.zeros(4, 4)
    converted = {
        "model.layers.0.self_attn.q_proj.weight": True,
        "model.layers.0.self_attn.o_proj.weight": False,
        "model.layers.1.self_attn.q_proj.weight": False,
        "model.layers.11.self_attn.q_proj.weight": True,  # not inside layer 1
        "model.layers.3.mlp.up_proj.weight": False,
        "model.layers.3.mlp.down_proj.weight": True,
    }
    assert {name: how.converts(name, matrix) for name in converted} == converted


def test_the_names_in_a_checkpoint_win_over_patterns(tmp_path):
    """What this one holds in FP8 no pattern could tell."""
    how = Fp8Format.from_config(CONFIG)
    plain = {
        "model.layers.0.mlp.odd.weight": torch.randn(8, 8),
        "model.layers.0.mlp.up_proj.weight": torch.randn(8, 8),
    }
    held = dict(
        quantize_named([("model.layers.0.mlp.odd.weight", plain["model.layers.0.mlp.odd.weight"])], how)
    )
    save_file({**plain, **held}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    found = checkpoint_format(tmp_path)
    assert found.names == {"model.layers.0.mlp.odd.weight"}
    made = dict(quantize_named(plain.items(), found))
    assert [name for name, tensor in made.items() if tensor.dtype == FP8] == ["model.layers.0.mlp.odd.weight"]


def test_a_checkpoint_that_is_not_quantised_has_no_format(tmp_path):
    assert checkpoint_format(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert checkpoint_format(tmp_path) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"activation_scheme": "static"}, "activation_scheme"),
    ],
)
def test_another_kind_of_quantisation_is_refused_with_the_file(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**CONFIG, **change}}))
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        checkpoint_format(tmp_path)


def test_factors_of_another_shape_are_refused():
    values, scale = quantize_blocks(torch.randn(256, 128), BLOCK)
    with pytest.raises(ValueError, match="factors of shape"):
        dequantize_blocks(values, scale[:1], BLOCK, torch.float32)


@pytest.mark.parametrize("start", [(0, 0), (5, 130), (127, 3), (128, 128)])
def test_a_part_of_a_weight_is_what_the_whole_has_there(start):
    values, scale = quantize_blocks(torch.randn(300, 260, generator=torch.Generator().manual_seed(1)), BLOCK)
    whole = dequantize_blocks(values, scale, BLOCK, torch.float32)
    region = (slice(start[0], start[0] + 140), slice(start[1], start[1] + 100))
    assert torch.equal(dequantize_part(values[region], scale, BLOCK, start), whole[region])


def every_number() -> torch.Tensor:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return numbers[numbers.isfinite()][None]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [1.0, 0.0123, 3e-6])
def test_stochastic_rounding_leaves_what_is_fp8_already(seed, scale):
    meant = every_number() * scale
    values, _ = quantize_blocks(meant, (1, 256), noise=uniform_noise(meant.shape, seed, "cpu"))
    assert torch.equal(values.float(), every_number())


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average():
    """Against float64: for each value the two e4m3 numbers around it, and how often it must go up."""
    grid = every_number().double().unique()
    for value in (0.0, 1e-4, 0.0021, 0.013, 0.3, 17.0, 17.9, 301.0, -5.3, -0.0007):
        above = grid[grid >= value].min().item()
        below = grid[grid <= value].max().item()
        weight = torch.full((1, 20_001), value)
        weight[0, 0] = LARGEST  # factor 1
        values, _ = quantize_blocks(weight, (1, 20_001), noise=uniform_noise(weight.shape, 5, "cpu"))
        rounded = values[0, 1:].double()
        assert set(rounded.tolist()) <= {below, above}
        if above > below:
            share = (value - below) / (above - below)
            deviation = (share * (1 - share) / 20_000) ** 0.5
            assert abs((rounded == above).double().mean().item() - share) < 5 * deviation + 1e-4


def test_updates_below_a_step_of_fp8_reach_the_engine_on_average_only_by_stochastic_rounding():
    """Small steps from FP8 weights: with the nearest value nothing moves, so engines keep the old policy."""
    generator = torch.Generator().manual_seed(0)
    start = dequantize_blocks(
        *quantize_blocks(torch.randn(256, 256, generator=generator) * 0.02, BLOCK), BLOCK, torch.float32
    )
    update = torch.where(torch.arange(256)[:, None] % 2 == 0, 1e-4, -1e-4).expand(256, 256)
    held = {}
    for seed in (None, 0):
        named = quantize_named([("a.weight", start + update)], Fp8Format(BLOCK), seed)
        (_, values), (_, factors) = named
        held[seed] = dequantize_blocks(values, factors, BLOCK, torch.float32)
    moved = {seed: ((kept - start) * update.sign()).mean().item() / 1e-4 for seed, kept in held.items()}
    assert abs(moved[None]) < 0.2 and abs(moved[0] - 1) < 0.1


def test_rounding_is_the_same_in_every_push_and_run_and_differs_by_weight():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator)
    a, b, c = (
        dict(quantize_named([(name, weight)], Fp8Format((64, 64)), seed))[name].view(torch.uint8)
        for name, seed in (("a.weight", 1), ("a.weight", 1), ("b.weight", 1))
    )
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_16_bit_checkpoint_is_served_with_its_output_and_routers_as_they_are(tmp_path):
    tensors = {
        "model.embed_tokens.weight": torch.zeros(8, 4),
        "model.layers.0.mlp.gate.weight": torch.zeros(2, 4),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4),
        "model.norm.weight": torch.zeros(4),
        "lm_head.weight": torch.zeros(8, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = served_config(tmp_path)
    assert config["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.gate"]
    how = Fp8Format.from_config(config)
    assert [name for name, tensor in tensors.items() if how.converts(name, tensor)] == [
        "model.layers.0.self_attn.q_proj.weight"
    ]
