"""A saved model takes its place in one rename, and touches nothing beside it."""

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.shared.hf_folder import _copy_other_files, _replace
from slime.backends.shared.hub_folder import ExpertsApart


@pytest.fixture
def new(tmp_path):
    return write(tmp_path / "hf-3.tmp", "config.json", "new")


def write(folder, name, text):
    folder.mkdir()
    (folder / name).write_text(text)
    return folder


def test_a_model_saved_again_replaces_the_one_before(tmp_path, new):
    path = write(tmp_path / "hf-3", "config.json", "old")
    _replace(new, path)
    assert [p.name for p in tmp_path.iterdir()] == ["hf-3"]
    assert (path / "config.json").read_text() == "new"


def test_a_folder_of_the_user_beside_it_is_not_touched(tmp_path, new):
    beside = [write(tmp_path / name, "thesis.tex", "years of work") for name in ("hf-3.old", "hf-3.old-1")]
    _replace(new, write(tmp_path / "hf-3", "config.json", "old"))
    assert all((folder / "thesis.tex").exists() for folder in beside)


def test_a_model_that_brings_its_own_code_keeps_it(tmp_path, new):
    source = write(tmp_path / "source", "configuration_mimo.py", "class MiMoConfig: ...")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "weights.bin").write_text("not these")
    _copy_other_files(str(source), new)
    assert {p.name for p in new.iterdir()} == {
        "config.json",
        "configuration_mimo.py",
        "tokenizer_config.json",
    }


def test_experts_in_one_tensor_are_read_one_by_one(tmp_path):
    fused, down = torch.randn(3, 8, 5), torch.randn(3, 5, 4)
    place, other = "model.layers.0.mlp.experts", torch.randn(2)
    stored = {f"{place}.gate_up_proj": fused, f"{place}.down_proj": down, "model.norm.weight": other}
    save_file(stored, tmp_path / "model.safetensors")
    folder = ExpertsApart(tmp_path)
    parts = {"gate_proj": fused[:, :4], "up_proj": fused[:, 4:], "down_proj": down}
    expected = {f"{place}.{e}.{part}.weight": parts[part][e] for part in parts for e in range(3)}
    expected["model.norm.weight"] = other
    assert folder.names == expected.keys()
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in expected.items())
    assert all(folder.shape(name) == tensor.shape for name, tensor in expected.items())
