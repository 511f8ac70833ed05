"""Converts Hugging Face folders to trainer checkpoints and back, with the trainer's code on one CPU.

FSDP keeps fp32 weights, four bytes per parameter; Megatron the model's own dtype and a gradient buffer.
"""

import argparse
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from slime.arguments import default_args
from slime.backends.families import register_configs
from slime.backends.shared.adapters import write_adapter
from slime.backends.shared.trainer_base import TrainBackend
from slime.backends.shared.trainer_folder import MANIFEST, is_checkpoint
from slime.catalog.backends import BACKENDS, DEFAULT_BACKEND
from slime.cli.one_rank import alone
from slime.cluster.checkpoints.checkpoint import write_checkpoint
from slime.utils.files.safetensors_files import all_files, files_by_tensor
from slime.utils.files.step_folders import Manifest, by_content, check_trainer_folder, find_step, step_folders

DTYPES = {None: None, "bfloat16": torch.bfloat16, "float32": torch.float32}


def from_hf(source: Path, target: Path, options: argparse.Namespace) -> None:
    """Write a checkpoint of rollout 0 without optimizer state, for `--load` with `--finetune`."""
    with _trainer(options.train_backend, source, {}) as backend:
        manifest = Manifest(rollout_id=0, run_id="convert", num_pushes=0)
        size = sum(file.stat().st_size for file in all_files(source))
        write_checkpoint(target, manifest, None, backend.save, needed_bytes=2 * size)


def to_hf(
    source: Path,
    target: Path,
    options: argparse.Namespace,
    settings: dict[str, Any] | None = None,
    *,
    adapter_only: bool = False,
) -> None:
    """Write the weights of a checkpoint, with config and tokenizer of the model that it started from.

    `settings`: the settings of the run that decide whether it trained adapters or a reward model.
    """
    checkpoint = _find(Path(options.load), options.ckpt_step)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    with _trainer(manifest.get("backend", DEFAULT_BACKEND), source, settings or {}) as backend:
        backend.load(checkpoint)
        if adapter_only:
            tensors = {name: tensor.cpu() for bucket in backend.export_adapter() for name, tensor in bucket}
            write_adapter(target, tensors, backend.adapter_config())
            return
        backend.save_hf(target, DTYPES[options.dtype])
    left = sorted(files_by_tensor(source).keys() - files_by_tensor(target).keys())
    if left:
        named = f"{len(left)} tensors of {source}, the first is {left[0]}"
        print(f"not converted, because this trainer does not build them: {named}")


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


@contextmanager
def _trainer(kind: str, source: Path, settings: dict[str, Any]) -> Iterator[TrainBackend]:
    """Create a trainer in this process with the weights of `source`; its SGD needs less memory than Adam."""
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
        **settings,
    )
    with alone():
        create_backend = importlib.import_module(f"slime.backends.{kind}").create_backend
        yield create_backend(args, rank=0, world_size=1, device="cpu")
