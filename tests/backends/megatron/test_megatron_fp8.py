"""Megatron reads a model in FP8 blocks as what the blocks stand for, and its stages save their own parts."""

import argparse
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_families import make_checkpoint
from megatron_helpers import exported, in_processes, make_family, megatron_args

from slime.backends.shared.hub_folder import CheckpointFolder
from slime.cli.convert import fp8_folder
from slime.utils.files.safetensors_files import all_files, read_tensors

pytestmark = pytest.mark.megatron
LAYOUTS = {"tp2": dict(tp=2, sp=True), "pp2": dict(pp=2)}


def load_and_save(rank: int, world_size: int, model: str, folder: str) -> dict:
    from slime.backends.megatron import create_backend

    results = {}
    for name, layout in LAYOUTS.items():
        args = megatron_args(model, update_weight_buffer_size=20_000, **layout)
        backend = create_backend(args, rank=rank, world_size=world_size, device="cpu")
        results[name] = exported(backend)
        backend.save_hf(Path(folder) / name, torch.float32)
    return results


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm_moe_dsa"])
def test_every_layout_reads_fp8_blocks_and_saves_what_it_read(tmp_path, kind):
    if kind == "qwen3_moe":
        model = make_family(tmp_path / "model", kind)
    else:
        model = make_checkpoint(tmp_path, kind)[1]
    options = argparse.Namespace(block_size=(16, 16), scale_fmt=None)
    fp8_folder.quantize(Path(model), tmp_path / "fp8", options)
    folder = CheckpointFolder(tmp_path / "fp8")
    expected = {name: folder.read(name).float() for name in folder.names}
    assert sum(folder.is_fp8(name) for name in expected) > len(expected) / 2
    found = in_processes(2, load_and_save, tmp_path, str(tmp_path / "fp8"), str(tmp_path))
    for name in LAYOUTS:
        torch.testing.assert_close(found[name], expected, rtol=0, atol=0)
        files = all_files(tmp_path / name)
        assert len(files) > 4
        torch.testing.assert_close(dict(read_tensors(files)), expected, rtol=0, atol=0)
