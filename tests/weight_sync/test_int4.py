"""INT4 weights: how they are rounded and packed, which they are, that trainer and engine hold the same."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expert_helpers import tiny_mixture
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model, make_tiny_tokenizer
from trainer_helpers import backend_of, init_process_group, random_samples, train, trainer_args

from slime.cli.main import main
from slime.cluster.training.rank_sender import RankSender
from slime.utils.models.int4_groups import (
    GROUP,
    dequantize_groups,
    fake_quantized,
    pack,
    quantize_groups,
)
from slime.weight_sync.int4 import engine_config, int4_names, make_converter, packed_config, quantize_named


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The values of words, digit by digit in base 16."""
    rows = [
        [word % 2**32 // 16**place % 16 - 8 for word in row for place in range(8)] for row in packed.tolist()
    ]
    return torch.tensor(rows)


def slow(weight: torch.Tensor) -> torch.Tensor:
    """The numbers that INT4 stands for, in float64, one group after another."""
    out = weight.double().clone()
    for group in out.flatten(0, -2).split(1):
        for part in group[0].split(GROUP):
            largest = part.abs().max().float()
            scale = (largest * torch.tensor(1 / 7)).bfloat16().double().item() or 1.0
            part.copy_((part / scale).round().clamp(-7, 7) * scale)
    return out


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 6), groups=st.integers(1, 4), spread=st.floats(0.0, 5.0), seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_value_is_the_nearest_of_fifteen_and_rounding_twice_changes_nothing(
    rows, groups, spread, seed, dtype
):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * GROUP, generator=generator) * spread
    weight = weight.to(dtype)
    weight[0, :GROUP] = 0
    values, scales = quantize_groups(weight)
    assert scales.dtype == torch.bfloat16 and values.abs().max() <= 7
    found = dequantize_groups(values, scales, torch.float64)
    torch.testing.assert_close(found, slow(weight), rtol=0, atol=0)
    assert (found - weight.double()).abs().max() <= scales.double().max() * 0.54
    once = fake_quantized(weight)
    assert once.dtype == dtype and torch.equal(fake_quantized(once), once)
    assert not fake_quantized(torch.zeros(1, GROUP)).any()


def test_words_hold_eight_values_the_first_in_the_lowest_bits():
    values = torch.randint(-7, 8, (5, 64), generator=torch.Generator().manual_seed(0))
    packed = pack(values.float())
    assert packed.dtype == torch.int32 and packed.shape == (5, 8)
    assert torch.equal(unpacked(packed), values)
    first = torch.full((1, 8), -8.0)
    first[0, 0] = 7
    assert pack(first).tolist() == [[15]]


def test_words_are_those_of_compressed_tensors():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = torch.randint(-7, 8, (5, 64), generator=torch.Generator().manual_seed(0))
    found = helpers.unpack_from_int32(pack(values.float()), 4, torch.Size((5, 64)))
    assert torch.equal(found.long(), values)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("int4") / "dense", init_std=0.2)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("int4") / "mixture"
    lm = tiny_mixture("qwen3_moe", vocab_size=128, moe_intermediate_size=32)
    lm.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_experts_become_int4_else_linear_layers(dense, mixture):
    assert {name.split(".")[-2] for name in int4_names(dense)} >= {"q_proj", "down_proj"}
    assert not [name for name in int4_names(dense) if "embed" in name or "lm_head" in name]
    names = int4_names(mixture)
    assert names and all(".mlp.experts." in name for name in names)
    ignored = packed_config(mixture)["ignore"]
    assert "lm_head" in ignored and "model.layers.0.self_attn.q_proj" in ignored
    assert not [module for module in ignored if ".experts." in module or "embed" in module]


def test_sglang_gets_packed_experts_and_no_packed_linear_layers(dense, mixture):
    assert engine_config("sglang", mixture)["format"] == "pack-quantized"
    assert engine_config("embedded", mixture) is None
    with pytest.raises(ValueError, match=r"takes new ones for experts only, and .* has none"):
        engine_config("sglang", dense)


def test_rows_that_groups_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"a\.weight has rows of 40: a scale of INT4 belongs to 32 values"):
        list(quantize_named([("a.weight", torch.zeros(2, 40))], frozenset({"a.weight"}), packed=True))


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_a_converted_folder_holds_the_rounded_weights_packed(kind, request, tmp_path):
    source, out = request.getfixturevalue(kind), tmp_path / "int4"
    assert main(["convert", "hf-to-int4", "--hf-checkpoint", str(source), "--save", str(out)]) == 0
    before, after = tensors_of(source), tensors_of(out)
    converted = 0
    for name, tensor in before.items():
        if f"{name}_packed" in after:
            values, scales = unpacked(after[f"{name}_packed"]), after[f"{name}_scale"]
            assert torch.equal(dequantize_groups(values, scales, tensor.dtype), fake_quantized(tensor)), name
            assert after[f"{name}_shape"].tolist() == list(tensor.shape) and name not in after
            converted += 1
        else:
            assert torch.equal(after[name], tensor), name
    assert converted == sum(before[name].dim() == 2 for name in int4_names(source)) > 0
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["weights"]["group_size"] == GROUP


@pytest.fixture(scope="module")
def group():
    init_process_group()
    yield
    dist.destroy_process_group()


def pushed(backend, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors as a trainer rank sends them to an embedded engine."""
    sender = RankSender.__new__(RankSender)
    sender._backend, sender._content, sender._quantization = backend, "model", None
    sender._convert = make_converter(folder, None, None)
    return {
        name: t.clone() for bucket in sender._stream(None) for name, t in sender._in_engine_format(bucket)
    }


def plain_model(folder: Path, tensors: dict[str, torch.Tensor], at: Path):
    """The model of transformers with these tensors, in float64."""
    import transformers

    shutil.copytree(folder, at)
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    lm = transformers.AutoModelForCausalLM.from_pretrained(at, dtype=torch.float64)
    lm.set_experts_implementation("eager")  # the others have no float64
    return lm


def logits_of(lm, ids: torch.Tensor) -> torch.Tensor:
    """The logits of one sequence, without the trainer's packing."""
    kept = lm.config._attn_implementation
    lm.set_attn_implementation("sdpa")
    try:
        return lm(ids).logits
    finally:
        lm.set_attn_implementation(kept)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_trainer_and_engine_compute_with_the_same_weights_and_gradients_pass_straight_through(
    kind, request, tmp_path
):
    folder = request.getfixturevalue(kind)
    args = trainer_args(folder, rollout_quantization="int4", loss_type="sft_loss", lr=1e-2)
    backend = backend_of(args)
    start = tensors_of(folder)
    for step in range(2):
        sent = pushed(backend, folder)
        exported = {name: t for bucket in backend.export() for name, t in bucket}
        for name, tensor in exported.items():
            rounded = name in int4_names(folder) and tensor.dim() == 2
            assert torch.equal(sent[name], fake_quantized(tensor) if rounded else tensor), name
        served = plain_model(folder, sent, tmp_path / str(step))
        ids = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            ours = logits_of(backend.model.lm, ids)
            torch.testing.assert_close(ours.double(), served(ids).logits, rtol=1e-4, atol=1e-5)
        train(backend, args, random_samples(4, 1))
    assert any(not torch.equal(start[name], tensor) for name, tensor in exported.items())
    ours, theirs = backend.model.lm, plain_model(folder, pushed(backend, folder), tmp_path / "last")
    for lm in (ours, theirs):
        lm.zero_grad()
        torch.log_softmax(logits_of(lm, ids), -1)[0, :-1].gather(1, ids[0, 1:, None]).sum().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        grad = expected[name].grad
        assert (parameter.grad.double() - grad).norm() <= 1e-4 * grad.norm() + 1e-9, name


@pytest.mark.usefixtures("group")
def test_models_without_whole_groups_and_other_experts_are_refused(tmp_path):
    from slime.backends.fsdp.int4_training import use_int4

    small = make_tiny_model(tmp_path / "small", hidden=48)
    with pytest.raises(ValueError, match="q_proj of qwen3 has rows of 48"):
        backend_of(trainer_args(small, rollout_quantization="int4"))
    with pytest.raises(ValueError, match="GptOssExperts of gpt_oss is not silu"):
        use_int4(tiny_mixture("gpt_oss"), torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="use --dtype bfloat16"):
        use_int4(tiny_mixture("qwen3_moe"), torch.device("cuda"), torch.float32)


@pytest.mark.usefixtures("group")
def test_only_the_trained_model_is_rounded(dense):
    from slime.backends.fsdp import create_backend
    from slime.backends.fsdp.int4_training import Int4Linear

    args = trainer_args(dense, rollout_quantization="int4")
    for role, rounded in (("actor", True), ("critic", False)):
        backend = create_backend(args, rank=0, world_size=1, device="cpu", role=role)
        assert any(isinstance(m, Int4Linear) for m in backend.model.modules()) == rounded


@pytest.mark.gpu
def test_a_gpu_rounds_as_a_cpu_does():
    weight = torch.randn(3, 70, 256, generator=torch.Generator().manual_seed(0))
    for tensor in (weight, weight.bfloat16()):
        assert torch.equal(fake_quantized(tensor.cuda()).cpu(), fake_quantized(tensor))
    values, scales = quantize_groups(weight[0].cuda())
    expected, expected_scales = quantize_groups(weight[0])
    assert torch.equal(pack(values).cpu(), pack(expected)) and torch.equal(scales.cpu(), expected_scales)
