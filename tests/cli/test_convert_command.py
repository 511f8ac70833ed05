"""`slime convert`: round trips change no bit, FP8 folders say
what they hold, mistakes are told before anything is written.
"""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.cli.main import main
from slime.utils.models.fp8_blocks import dequantize_blocks

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core"
)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def make_model(path, *, shards: str = "1GB", tied: bool = True) -> str:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=127,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        dtype=BF16,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=BF16)
    model.save_pretrained(path, max_shard_size=shards)
    (path / "tokenizer.json").write_text('{"kept": true}')
    return str(path)


def weights(folder) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def fails(argv: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", *argv])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def round_trip(tmp_path, backend: str) -> None:
    model = make_model(tmp_path / "model")
    saved, back = str(tmp_path / "dist"), str(tmp_path / "back")
    assert (
        main(["convert", "hf-to-dist", "--hf-checkpoint", model, "--save", saved, "--train-backend", backend])
        == 0
    )
    assert main(["convert", "dist-to-hf", "--load", saved, "--hf-checkpoint", model, "--save", back]) == 0
    expected, found = weights(tmp_path / "model"), weights(tmp_path / "back")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == BF16 and torch.equal(found[name], tensor), name
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"kept": true}'


def test_round_trip_through_an_fsdp_checkpoint_changes_no_bit(tmp_path):
    round_trip(tmp_path, "fsdp")


@pytest.mark.slow
@pytest.mark.megatron
@needs_megatron
def test_round_trip_through_a_megatron_checkpoint_changes_no_bit(tmp_path):
    # In a process of its own: the shims that let Megatron run on a CPU stay in a process for good.
    import subprocess
    import sys

    model, saved, back = (
        make_model(tmp_path / "model", tied=False),
        str(tmp_path / "dist"),
        str(tmp_path / "back"),
    )
    slime = [sys.executable, "-m", "slime", "convert"]
    to_dist = ["hf-to-dist", "--hf-checkpoint", model, "--save", saved, "--train-backend", "megatron"]
    to_hf = ["dist-to-hf", "--load", saved, "--hf-checkpoint", model, "--save", back]
    for words in (to_dist, to_hf):
        subprocess.run([*slime, *words], check=True, timeout=600)
    expected, found = weights(tmp_path / "model"), weights(tmp_path / "back")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.megatron
@needs_megatron
def test_heads_of_a_type_that_transformers_lacks_come_through_megatron(tmp_path):
    import subprocess
    import sys

    from megatron_families import make_checkpoint

    model, _ = make_checkpoint(tmp_path, "mimo")
    slime, saved, back = (
        [sys.executable, "-m", "slime", "convert"],
        str(tmp_path / "dist"),
        str(tmp_path / "back"),
    )
    to_dist = ["hf-to-dist", "--hf-checkpoint", model, "--save", saved, "--train-backend", "megatron"]
    to_hf = ["dist-to-hf", "--load", saved, "--hf-checkpoint", model, "--save", back]
    for words in (to_dist, to_hf):
        subprocess.run([*slime, *words], check=True, timeout=600)
    expected, found = weights(tmp_path / "mimo"), weights(tmp_path / "back")
    assert expected.keys() == found.keys() and any("mtp_layers" in name for name in found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_tensors_that_fsdp_does_not_build_are_copied_if_heads_and_else_named(tmp_path, capsys):
    model = make_model(tmp_path / "model")
    further = ("model.layers.9.eh_proj.weight", "model.abacus.weight")
    tensors = weights(tmp_path / "model") | {name: torch.zeros(2, 2, dtype=BF16) for name in further}
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    saved, back = str(tmp_path / "dist"), str(tmp_path / "back")
    assert main(["convert", "hf-to-dist", "--hf-checkpoint", model, "--save", saved]) == 0
    assert main(["convert", "dist-to-hf", "--load", saved, "--hf-checkpoint", model, "--save", back]) == 0
    assert "1 tensors of" in (shown := capsys.readouterr().out) and "model.abacus.weight" in shown
    assert "model.layers.9.eh_proj.weight" in weights(tmp_path / "back")


def test_existing_output_and_wrong_folders_are_refused(tmp_path, capsys):
    model = make_model(tmp_path / "model")
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    words = ["hf-to-dist", "--hf-checkpoint", model, "--save", str(full)]
    assert f"--save {full} exists already" in fails(words, capsys)
    assert "no config.json" in fails(
        ["hf-to-dist", "--hf-checkpoint", str(full), "--save", str(tmp_path / "x")], capsys
    )
    words = ["dist-to-hf", "--load", str(full), "--hf-checkpoint", model, "--save", str(tmp_path / "x")]
    assert f"--load {full} holds no checkpoint" in fails(words, capsys)
    assert (full / "notes.txt").read_text() == "mine" and not (tmp_path / "x").exists()


def test_model_without_one_of_its_tensors_is_refused_by_name(tmp_path, capsys):
    model = make_model(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    words = ["hf-to-dist", "--hf-checkpoint", model, "--save", str(tmp_path / "dist")]
    assert "no weights for model.layers.1.mlp.up_proj.weight" in fails(words, capsys)
    assert not (tmp_path / "dist").exists()


def test_fp8_folder_holds_blocks_and_says_so(tmp_path):
    model = make_model(tmp_path / "model", shards="20KB", tied=False)
    out = tmp_path / "fp8"
    words = ["hf-to-fp8", "--hf-checkpoint", model, "--save", str(out), "--block-size", "16", "16"]
    assert main(["convert", *words]) == 0
    before, after = weights(tmp_path / "model"), weights(out)
    for name, tensor in before.items():
        if "_proj" in name:
            assert after[name].dtype == FP8
            read = dequantize_blocks(after[name], after[name + "_scale_inv"], (16, 16), torch.float32)
            assert (read - tensor.float()).abs().max() <= tensor.float().abs().max() / 16
        else:
            assert torch.equal(after[name], tensor), name
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": ["lm_head"],
    }
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert (out / "tokenizer.json").is_file() and not (tmp_path / "fp8.tmp").exists()


def test_fp8_of_a_cut_file_leaves_nothing_behind(tmp_path, capsys):
    model = make_model(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    words = ["hf-to-fp8", "--hf-checkpoint", model, "--save", str(tmp_path / "fp8")]
    assert "model.safetensors" in fails(words, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_fp8_of_an_fp8_folder_or_over_another_is_refused(tmp_path, capsys):
    model = make_model(tmp_path / "model")
    words = ["hf-to-fp8", "--hf-checkpoint", model, "--save", str(tmp_path / "fp8")]
    assert main(["convert", *words]) == 0
    assert "exists already" in fails(words, capsys)
    again = ["hf-to-fp8", "--hf-checkpoint", str(tmp_path / "fp8"), "--save", str(tmp_path / "x")]
    assert "is quantised already (fp8)" in fails(again, capsys)


def test_an_fp8_model_becomes_what_its_blocks_stand_for(tmp_path, capsys):
    """Blocks of 16 x 20 do not divide the matrices, and factors lie in other files than their weights."""
    model = make_model(tmp_path / "model", shards="20KB", tied=False)
    fp8, out = tmp_path / "fp8", tmp_path / "bf16"
    words = ["hf-to-fp8", "--hf-checkpoint", model, "--save", str(fp8), "--block-size", "16", "20"]
    assert main(["convert", *words]) == 0
    move_factors(fp8)
    back = ["fp8-to-bf16", "--hf-checkpoint", str(fp8), "--save", str(out)]
    assert main(["convert", *back]) == 0
    stored, read = weights(fp8), weights(out)
    assert read.keys() == weights(tmp_path / "model").keys()
    converted = [name for name in read if stored[name].dtype == FP8]
    assert len(converted) == 14
    for name, tensor in read.items():
        if name not in converted:
            assert torch.equal(tensor, stored[name]), name
            continue
        factors = stored[name + "_scale_inv"].double()
        whole = factors.repeat_interleave(16, 0).repeat_interleave(20, 1)
        expected = stored[name].double() * whole[: tensor.shape[0], : tensor.shape[1]]
        assert tensor.dtype == BF16
        # Half a step of bf16, and what fp32 rounds before.
        assert ((tensor.double() - expected).abs() <= expected.abs() * (2.0**-8 + 2.0**-23)).all(), name
    config = json.loads((out / "config.json").read_text())
    assert config == json.loads((tmp_path / "model" / "config.json").read_text())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read.values())
    assert (out / "tokenizer.json").is_file() and not (tmp_path / "bf16.tmp").exists()
    assert "exists already" in fails(back, capsys)
    assert "nothing to convert" in fails([*back[:2], str(out), "--save", str(tmp_path / "x")], capsys)


def move_factors(folder):
    """Write all factors of an FP8 folder to a file of their own, as some folders have them."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    factors = {}
    for name in set(index["weight_map"].values()):
        tensors = load_file(folder / name)
        factors |= {key: tensors.pop(key) for key in list(tensors) if key.endswith("_scale_inv")}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    save_file(factors, folder / "factors.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(factors, "factors.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda factors: factors.popitem(), "download the model again"),
        (
            lambda factors: factors.update({key: value[:1] for key, value in factors.items()}),
            "files are of different models",
        ),
    ],
)
def test_factors_that_are_missing_or_of_another_size_are_named(tmp_path, capsys, change, message):
    model = make_model(tmp_path / "model", tied=False)
    fp8 = tmp_path / "fp8"
    words = ["hf-to-fp8", "--hf-checkpoint", model, "--save", str(fp8), "--block-size", "16", "20"]
    assert main(["convert", *words]) == 0
    tensors = load_file(fp8 / "model.safetensors")
    factors = {key: tensors.pop(key) for key in list(tensors) if key.endswith("_scale_inv")}
    change(factors)
    save_file(tensors | factors, fp8 / "model.safetensors", metadata={"format": "pt"})
    back = ["fp8-to-bf16", "--hf-checkpoint", str(fp8), "--save", str(tmp_path / "bf16")]
    said = fails(back, capsys)
    assert message in said and "model.safetensors" in said and "_proj.weight_scale_inv" in said
    assert not (tmp_path / "bf16").exists()
