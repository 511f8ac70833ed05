"""Converts Hugging Face folders to Megatron's torch_dist checkpoints and back, one tensor at a time."""

import argparse
from pathlib import Path
from typing import Any

import torch

from slime.backends.families import COMPUTED_AS, family_of, register_configs
from slime.backends.fsdp.hf_export import hub_shapes, in_buckets
from slime.backends.shared import hf_folder
from slime.backends.torch_dist.reading import TorchDistFolder, check_fit
from slime.backends.torch_dist.writing import write
from slime.cli.convert.trainer_checkpoint import alone, dtype_of, need_model, refuse_existing
from slime.utils.files.torch_dist_folder import UnreadFolder, find_iteration

_BUCKET_BYTES = 4 * 2**30  # about the size of one file


def from_hf(options: argparse.Namespace) -> None:
    """Write `release` and its tracker file into `--save DIR_torch_dist`."""
    source, target = Path(options.hf_checkpoint), Path(options.save)
    refuse_existing(target)
    config = _config_of(source)
    write(source, target, config)


def to_hf(options: argparse.Namespace) -> None:
    """Write the weights of an iteration, with config and tokenizer of the original model."""
    source, target = Path(options.hf_checkpoint), Path(options.save)
    refuse_existing(target)
    config = _config_of(source)
    try:
        iteration = find_iteration(options.load, options.ckpt_step)
    except UnreadFolder as error:
        raise ValueError(f"--load {options.load} {error}: nothing was converted.") from None
    folder = TorchDistFolder(iteration, config)
    check_fit(folder, _shapes_of(config))
    dtype = dtype_of(options) or config.dtype or torch.float32
    named = folder.tensors(tied=bool(config.tie_word_embeddings))
    exact = (
        (name, tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype))
        for name, tensor in named
    )
    with alone():
        hf_folder.save(in_buckets(exact, _BUCKET_BYTES, None), target, str(source), dtype, rank=0)


def _config_of(source: Path) -> Any:
    """Return the config of the model; ValueError for an unknown family."""
    # Heavy import, only needed here.
    from transformers import AutoConfig

    need_model(source)
    register_configs()
    config = AutoConfig.from_pretrained(source)
    try:
        family_of(config)
    except ValueError as error:
        raise ValueError(
            f"--hf-checkpoint {source} has no names in Megatron's format here: {error}"
        ) from None
    return config


def _shapes_of(config: Any) -> dict[str, torch.Size]:
    if config.model_type in COMPUTED_AS:
        # Heavy import, only needed here.
        from transformers import AutoConfig

        computed_as = COMPUTED_AS[config.model_type]
        values = {name: value for name, value in config.to_dict().items() if name != "model_type"}
        config = AutoConfig.for_model(computed_as, **values)
    return hub_shapes(config)
