"""Checkpoints of Megatron's (torch_dist): read bit for bit under hub names, damage told in sentences."""

import json
import pickle
import shutil

import pytest
import torch
from megatron_families import make_checkpoint
from trainer_helpers import backend_of, trainer_args, weights_of
from transformers import AutoConfig

from slime.backends.families import register_configs
from slime.backends.shared.hub_folder import CheckpointFolder
from slime.backends.torch_dist.keys import slices_of
from slime.backends.torch_dist.pieces import StoredTensor, UnknownLayout
from slime.backends.torch_dist.reading import TorchDistFolder, check_fit, weights_source
from slime.backends.torch_dist.writing import write
from slime.cli.main import main
from slime.utils.files.torch_dist_folder import UnreadFolder, find_iteration, is_megatron_folder

pytestmark = pytest.mark.usefixtures("process_group")


def convert(folder, name: str, **changes):
    """(HF folder, its torch_dist folder, its config); weights of one family and size are always the same."""
    register_configs()
    model, _ = make_checkpoint(folder, name, **changes)
    config = AutoConfig.from_pretrained(model)
    write(model, folder / f"{name}_torch_dist", config)
    return model, folder / f"{name}_torch_dist" / "release", config


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return convert(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def copy(qwen3, tmp_path):
    """A release of one's own, to damage."""
    return shutil.copytree(qwen3[1], tmp_path / "release"), qwen3[2]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3", "mimo"])
def test_every_tensor_comes_back_bit_for_bit(tmp_path, name):
    model, release, config = convert(tmp_path, name)
    folder = TorchDistFolder(release, config)
    source = CheckpointFolder(model)
    copies = {n for n in source.names if n.endswith(("4.embed_tokens.weight", "shared_head.head.weight"))}
    assert folder.names == source.names - copies
    for key in folder.names:
        assert torch.equal(folder.read(key), source.read(key)), key
        assert folder.shape(key) == source.read(key).shape


def test_the_command_converts_both_ways(qwen3, tmp_path):
    model = qwen3[0]
    there, back = str(tmp_path / "a_torch_dist"), str(tmp_path / "back")
    main(["convert", "hf-to-torch-dist", "--hf-checkpoint", model, "--save", there])
    assert (tmp_path / "a_torch_dist" / "latest_checkpointed_iteration.txt").read_text() == "release"
    # The command makes a process group of its own.
    torch.distributed.destroy_process_group()
    main(["convert", "dist-to-hf", "--load", there, "--hf-checkpoint", model, "--save", back])
    from trainer_helpers import init_process_group

    init_process_group()
    source, found = CheckpointFolder(model), CheckpointFolder(back)
    assert found.names == source.names
    assert all(torch.equal(found.read(name), source.read(name)) for name in source.names)


def named(key: str, *size: int) -> list[tuple[str, tuple[int, ...], int]]:
    return [(part.name, part.index, part.half) for part in slices_of(StoredTensor(key, size, ()))]


def test_all_forms_of_megatrons_keys_are_the_same_parameters():
    fused = "self_attention.linear_qkv.layer_norm_weight"
    assert named(f"decoder.layers.{fused}", 2, 8) == [
        ("decoder.layers.0.input_layernorm.weight", (0,), 0),
        ("decoder.layers.1.input_layernorm.weight", (1,), 0),
    ]
    assert named(f"decoder.layers.7.{fused}", 8) == [("decoder.layers.7.input_layernorm.weight", (), 0)]
    expert = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc1.weight"
    stacked = named("decoder.layers.mlp.experts.experts.linear_fc1.weight", 2, 3, 8, 4)
    assert len(stacked) == 6 and stacked[-1] == (expert.format(2), (1, 2), 0)
    by_layer = named("decoder.layers.1.mlp.experts.experts.linear_fc1.weight", 3, 8, 4)
    assert by_layer[1] == (expert.format(1), (1,), 0)
    alone = "decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight"
    assert [named(alone + half, 4, 4) for half in ("_w", "_v")] == [
        [(expert.format(2), (), 0)],
        [(expert.format(2), (), 1)],
    ]
    assert named("mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight", 8, 8)[0][0] == (
        "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"
    )
    no_weights = (
        "optimizer.state.exp_avg.decoder.layers.mlp",
        "chained_1.optimizer.x",
        "a._extra_state/shard_0",
    )
    assert not any(named(key, 4) for key in no_weights)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_the_fsdp_trainer_starts_from_it_and_refers_to_it(tmp_path, name):
    other, _ = make_checkpoint(tmp_path / "other", name)
    for file in (tmp_path / "other").rglob("*.safetensors"):
        from safetensors.torch import load_file, save_file

        save_file({key: tensor * 0.5 for key, tensor in load_file(file).items()}, file, {"format": "pt"})
    model, release, _ = convert(tmp_path, name)
    args = trainer_args(other, start_from=str(release), ref_load=str(release), use_kl_loss=True)
    backend = backend_of(args)
    expected = weights_of(backend_of(trainer_args(model)))
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights_of(backend).items())
    backend.copy_weights("ref", "actor")
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights_of(backend).items())


# -- what is damaged or of another model


def test_a_file_that_ends_early_is_named(copy):
    release, config = copy
    file = release / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"checkpoint {release} .*__0_0.distcp ends after \d+ bytes.*again"):
        dict(TorchDistFolder(release, config).tensors())


def test_bytes_that_changed_are_named(copy):
    release, config = copy
    file = release / "__0_0.distcp"
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(ValueError, match=r"__0_0.distcp is damaged at embedding"):
        TorchDistFolder(release, config).read("model.embed_tokens.weight")


def test_a_file_that_is_not_there_is_named(copy):
    release, config = copy
    (release / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=rf"checkpoint {release} .*__0_0.distcp is missing, which its"):
        dict(TorchDistFolder(release, config).tensors())


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps([1, 2])])
def test_a_damaged_list_of_tensors_is_named(copy, content):
    release, config = copy
    (release / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=rf"checkpoint {release} cannot be read: its .metadata is damaged"):
        TorchDistFolder(release, config)


def test_a_list_of_tensors_runs_no_code(copy, tmp_path):
    release, config = copy
    (release / ".metadata").write_bytes(
        b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    )
    with pytest.raises(ValueError, match="damaged"):
        TorchDistFolder(release, config)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(num_hidden_layers=3), "more layers or experts: model.layers.3"),
        (dict(num_hidden_layers=5), "it has no model.layers.4"),
        (dict(hidden_size=48), r"is \[127, 32\] there and \[127, 48\] here"),
        (dict(intermediate_size=40), r"there and \[40, 32\] here|there and \[32, 40\] here"),
        (dict(vocab_size=200), "fewer rows than the 200 tokens"),
        (dict(num_key_value_heads=4, head_dim=48), "of another shape than --hf-checkpoint says|here"),
    ],
)
def test_a_model_of_another_size_is_named(qwen3, changes, said):
    from slime.backends.fsdp.hf_export import hub_shapes

    config = type(qwen3[2])(**(qwen3[2].to_dict() | changes | {"layer_types": None}))
    with pytest.raises(ValueError, match=said) as refused:
        check_fit(TorchDistFolder(qwen3[1], config), hub_shapes(config))
    assert str(qwen3[1]) in str(refused.value) and "--hf-checkpoint" in str(refused.value)


def test_a_converted_model_of_unknown_layout_leaves_hf_checkpoint_its_place(qwen3, tmp_path, caplog):
    """A model without norms on queries and keys has no place for them."""
    other = AutoConfig.from_pretrained(make_checkpoint(tmp_path, "llama")[0])
    assert weights_source(qwen3[1], other, "the-hf-model") == "the-hf-model"
    assert "q_layernorm" in caplog.text and "the-hf-model are used instead" in caplog.text
    trained = shutil.copytree(qwen3[1], tmp_path / "iter_0000012")
    with pytest.raises(ValueError, match=r"iter_0000012 cannot be read: a llama does not have"):
        weights_source(trained, other, "the-hf-model")
    with pytest.raises(UnknownLayout):
        TorchDistFolder(trained, other)


def test_an_iteration_is_found_or_said_why_not(qwen3, tmp_path):
    folder = tmp_path / "runs"
    assert not is_megatron_folder(folder)
    shutil.copytree(qwen3[1], folder / "iter_0000012")
    shutil.copytree(qwen3[1], folder / "iter_0000007")
    (folder / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert find_iteration(folder).name == "iter_0000012"
    assert find_iteration(folder, 7).name == "iter_0000007"
    assert find_iteration(folder / "iter_0000007").name == "iter_0000007"
    with pytest.raises(UnreadFolder, match="no folder iter_0000009"):
        find_iteration(folder, 9)
    config = folder / "iter_0000012" / "metadata.json"
    config.write_text(json.dumps({"sharded_backend": "zarr"}))
    (folder / "iter_0000012" / ".metadata").unlink()
    with pytest.raises(UnreadFolder, match="format zarr"):
        find_iteration(folder)
    config.write_text(json.dumps({"sharded_backend": "torch_dist"}))
    with pytest.raises(UnreadFolder, match="not written to its end"):
        find_iteration(folder)
    config.unlink()
    (folder / "iter_0000012" / "mp_rank_00").mkdir()
    with pytest.raises(UnreadFolder, match="older format"):
        find_iteration(folder)
