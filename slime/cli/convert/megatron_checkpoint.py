"""Converts Hugging Face folders to Megatron's torch_dist checkpoints and back, one tensor at a time."""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from slime.backends.families import COMPUTED_AS, family_of, register_configs
from slime.backends.fsdp.hf_export import hub_shapes, in_buckets
from slime.backends.shared import hf_folder
from slime.backends.torch_dist.reading import TorchDistFolder, check_fit
from slime.backends.torch_dist.writing import write
from slime.cli.convert.trainer_checkpoint import DTYPES
from slime.cli.one_rank import alone
from slime.utils.files.torch_dist_folder import UnreadFolder, find_iteration

_BUCKET_BYTES = 4 * 2**30  # about the size of one file


def from_hf(source: Path, target: Path) -> None:
    """Write `release` and its tracker file into `--save DIR_torch_dist`."""
    write(source, target, _config_of(source))


def to_hf(source: Path, target: Path, options: argparse.Namespace) -> None:
    """Write the weights of an iteration, with config and tokenizer of the original model."""
    config = _config_of(source)
    try:
        iteration = find_iteration(options.load, options.ckpt_step)
    except UnreadFolder as error:
        raise ValueError(f"--load {options.load} {error}: nothing was converted.") from None
    folder = TorchDistFolder(iteration, config)
    shape_config = config
    if config.model_type in COMPUTED_AS:
        values = {name: value for name, value in config.to_dict().items() if name != "model_type"}
        shape_config = AutoConfig.for_model(COMPUTED_AS[config.model_type], **values)
    check_fit(folder, hub_shapes(shape_config))
    dtype = DTYPES[options.dtype] or config.dtype or torch.float32
    named = folder.tensors(tied=bool(config.tie_word_embeddings))
    exact = (
        (name, tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype))
        for name, tensor in named
    )
    with alone():
        hf_folder.save(in_buckets(exact, _BUCKET_BYTES, None), target, str(source), dtype)


def _config_of(source: Path) -> Any:
    """Return the config of the model; ValueError for an unknown family."""
    register_configs()
    config = AutoConfig.from_pretrained(source)
    try:
        family_of(config)
    except ValueError as error:
        raise ValueError(
            f"--hf-checkpoint {source} has no names in Megatron's format here: {error}"
        ) from None
    return config
