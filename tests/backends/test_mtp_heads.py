"""MTP heads survive a trainer that does not build them."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model
from trainer_helpers import trainer_args

from slime.backends.fsdp import create_backend
from slime.backends.shared.hf_folder import is_mtp_head, unbuilt_heads


@pytest.mark.parametrize(
    ("name", "is_head"),
    [
        ("model.layers.61.eh_proj.weight", True),
        ("model.layers.1.mlp.up_proj.weight", False),
        ("model.mtp_layers.0.input_proj.weight", True),
        ("mtp.layers.0.fc.weight", True),
        ("model.layers.2.self_attn.q_proj.weight", True),
        ("lm_head.weight", False),
    ],
)
def test_heads_are_known_by_their_names(name, is_head):
    assert is_mtp_head(name, 2) == is_head


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
    return found


def test_a_saved_model_has_the_heads_of_its_source(tmp_path, process_group):
    source = make_tiny_model(tmp_path / "tiny")
    weights = load_file(source / "model.safetensors")
    heads = {"model.layers.9.eh_proj.weight": torch.randn(4, 8), "mtp.norm.weight": torch.randn(4)}
    save_file(weights | heads, source / "model.safetensors", metadata={"format": "pt"})
    backend = create_backend(trainer_args(source), rank=0, world_size=1, device="cpu")
    backend.save_hf(tmp_path / "saved", torch.float32)
    saved = tensors_of(tmp_path / "saved")
    assert saved.keys() == weights.keys() | heads.keys()
    for name, value in heads.items():
        assert torch.equal(saved[name], value)
    assert not unbuilt_heads(str(source), backend.model.lm.config, saved, torch.float32)
