"""Converts a Hugging Face folder to FP8 file by file; the new folder appears complete or not at all."""

import argparse
import json
import shutil
from pathlib import Path

from torch import Tensor

from slime.utils.files.safetensors_files import (
    INDEX,
    model_files,
    read_tensors,
    tensor_names,
    write_index,
    write_tensors,
)
from slime.utils.models.model_config import quantization_config
from slime.weight_sync.fp8 import quantize_state

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")


def convert(source: Path, target: Path, options: argparse.Namespace) -> None:
    config = json.loads((source / "config.json").read_text())
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"--hf-checkpoint {source} is quantised already ({method}): give the 16-bit model.")
    if min(options.block_size) < 1:
        raise ValueError(
            f"--block-size is {' '.join(map(str, options.block_size))}: both must be at least 1."
        )
    block = tuple(options.block_size)
    how = quantization_config(block, scale_fmt=options.scale_fmt)
    files = model_files(source)
    if not files:
        raise ValueError(
            f"--hf-checkpoint {source} holds no safetensors: save the model again with save_pretrained."
        )
    if absent := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"--hf-checkpoint {source}: {INDEX} names {', '.join(absent)}, which is not there.")
    names = {file: tensor_names(file) for file in files}  # reports damage before anything is written
    staging = target.with_name(target.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    kept, total = [], 0
    for file in files:
        tensors = dict(quantize_state(read_tensors([file]), how))
        write_tensors(staging / file.name, tensors)
        weight_map.update(dict.fromkeys(tensors, file.name))
        total += sum(tensor.nbytes for tensor in tensors.values())
        kept += [name.removesuffix(".weight") for name in names[file] if _stays(name, tensors)]
    if len(set(weight_map.values())) > 1 or (source / INDEX).is_file():
        write_index(staging, weight_map, total)
    how = quantization_config(block, scale_fmt=options.scale_fmt, kept=kept)
    (staging / "config.json").write_text(json.dumps(config | {"quantization_config": how}, indent=2))
    _copy_rest(source, staging)
    staging.rename(target)


def _stays(name: str, tensors: dict[str, Tensor]) -> bool:
    """Return whether this linear layer stays unquantised, which the config must list."""
    matrix = name.endswith(".weight") and tensors[name].ndim == 2 and not name.endswith(_EMBEDDINGS)
    return matrix and tensors[name].element_size() > 1


def _copy_rest(source: Path, target: Path) -> None:
    """Copy tokenizer, generation config, chat template and code: everything but weights."""
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(".index.json")
        if file.is_file() and not weights and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
