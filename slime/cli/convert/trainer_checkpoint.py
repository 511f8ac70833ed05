"""Converts Hugging Face folders to trainer checkpoints and back, with the trainer's code on one CPU.

FSDP keeps fp32 weights, four bytes per parameter; Megatron the model's own dtype and a gradient buffer.
"""

import argparse
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from slime.arguments import default_args
from slime.backends.base import TrainBackend
from slime.backends.families import register_configs
from slime.backends.shared.trainer_folder import MANIFEST, is_checkpoint
from slime.catalog.backends import BACKENDS, DEFAULT_BACKEND
from slime.cluster.checkpoints.checkpoint import write_checkpoint
from slime.utils.files.safetensors_files import all_files, files_by_tensor
from slime.utils.files.step_folders import Manifest, by_content, check_trainer_folder, find_step, step_folders
from slime.utils.machine.process_groups import stay_on_loopback


def from_hf(options: argparse.Namespace) -> None:
    """Write a checkpoint of rollout 0 without optimizer state, for `--load` with `--finetune`."""
    source, target = Path(options.hf_checkpoint), Path(options.save)
    refuse_existing(target)
    need_model(source)
    with _trainer(options.train_backend, source) as backend:
        manifest = Manifest(rollout_id=0, run_id="convert", num_pushes=0)
        size = sum(file.stat().st_size for file in all_files(source))
        write_checkpoint(target, manifest, None, backend.save, needed_bytes=2 * size)


def to_hf(options: argparse.Namespace) -> None:
    """Write the weights of a checkpoint, with config and tokenizer of the model that it started from."""
    source, target = Path(options.hf_checkpoint), Path(options.save)
    refuse_existing(target)
    need_model(source)
    checkpoint = _find(Path(options.load), options.ckpt_step)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    dtype = dtype_of(options)
    with _trainer(manifest.get("backend", DEFAULT_BACKEND), source) as backend:
        backend.load(checkpoint)
        backend.save_hf(target, dtype)
    _name_left_out(source, target)


def _name_left_out(source: Path, target: Path) -> None:
    """Report tensors that the new folder lacks, because the trainer does not build them."""
    left = sorted(files_by_tensor(source).keys() - files_by_tensor(target).keys())
    if left:
        print(
            f"left out, because this trainer does not build them: {len(left)} tensors of {source}, the "
            f"first is {left[0]}"
        )


def _find(folder: Path, step: int | None) -> Path:
    """Return the trainer's folder of a checkpoint, given that folder, a step or a folder of steps."""
    for path in (folder, folder / "trainer"):
        if is_checkpoint(path):
            check_trainer_folder(path.resolve())
            return path
    steps = step_folders(folder)
    if not steps:
        raise ValueError(
            f"--load {folder} holds no checkpoint: give a folder that --save of a run wrote, or one step_* "
            "in it."
        )
    # Chosen by number: a damaged checkpoint is an error here, while a run would load the one before it.
    chosen = find_step(folder, max(steps) if step is None else step, damage_of=by_content)
    assert chosen is not None, f"{folder} holds steps, and a number that is not there is an error"
    return chosen.trainer


def dtype_of(options: argparse.Namespace) -> torch.dtype | None:
    return {None: None, "bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]


def refuse_existing(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--save {target} is there already: give a new folder, or remove that one.")


def need_model(source: Path) -> None:
    if not (source / "config.json").is_file():
        raise ValueError(
            f"--hf-checkpoint {source}: no config.json there, so it is not a Hugging Face model folder."
        )


@contextmanager
def _trainer(kind: str, source: Path) -> Iterator[TrainBackend]:
    """Create a trainer of one process with the weights of `source`; SGD, because Adam needs more memory."""
    # Heavy import, only needed here.
    from transformers import AutoConfig

    register_configs()
    config = AutoConfig.from_pretrained(source)
    in_16_bit = BACKENDS[kind].weights_in_dtype and config.dtype == torch.bfloat16
    args = default_args(
        hf_checkpoint=str(source),
        train_backend=kind,
        dtype="bfloat16" if in_16_bit else "float32",
        optimizer="sgd",
        lr=0.0,
        finetune=True,
        no_save_optim=True,
    )
    with alone():
        create_backend = importlib.import_module(f"slime.backends.{kind}").create_backend
        yield create_backend(args, rank=0, world_size=1, device="cpu")


@contextmanager
def alone() -> Iterator[None]:
    """Create a process group of one rank."""
    stay_on_loopback()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
