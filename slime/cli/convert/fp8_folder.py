"""Converts a Hugging Face folder to FP8 or back, or to INT4; the new one appears complete or not at all."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from slime.backends.shared.hub_folder import CheckpointFolder
from slime.utils.files.safetensors_files import (
    INDEX,
    model_files,
    read_tensors,
    tensor_names,
    write_index,
    write_tensors,
)
from slime.utils.models.model_config import block_size_of, quantization_config
from slime.weight_sync import int4
from slime.weight_sync.fp8 import quantize_state

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")


def quantize(source: Path, target: Path, options: argparse.Namespace) -> None:
    """Write a 16-bit model in FP8 blocks."""
    config = _unquantized(source)
    if min(options.block_size) < 1:
        raise ValueError(
            f"--block-size is {' '.join(map(str, options.block_size))}: both must be at least 1."
        )
    block = tuple(options.block_size)
    how = quantization_config(block, scale_fmt=options.scale_fmt)
    kept: list[str] = []

    def convert(file: Path) -> dict[str, Tensor]:
        tensors = dict(quantize_state(read_tensors([file]), how))
        kept.extend(name.removesuffix(".weight") for name in tensor_names(file) if _stays(name, tensors))
        return tensors

    staging = _write(source, target, convert)
    how = quantization_config(block, scale_fmt=options.scale_fmt, kept=kept)
    _finish(source, staging, target, config | {"quantization_config": how})


def quantize_int4(source: Path, target: Path) -> None:
    """Write a 16-bit model with packed INT4 weights."""
    config, names = _unquantized(source), int4.int4_names(source)
    staging = _write(
        source, target, lambda file: dict(int4.quantize_named(read_tensors([file]), names, packed=True))
    )
    _finish(source, staging, target, config | {"quantization_config": int4.packed_config(source)})


def _unquantized(source: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"--hf-checkpoint {source} is quantised already ({method}): give the 16-bit model.")
    return config


def dequantize(source: Path, target: Path) -> None:
    """Write a model in FP8 blocks in bf16; tensors that are not in FP8 stay as they are."""
    config = json.loads((source / "config.json").read_text())
    if block_size_of(source) is None:
        raise ValueError(
            f"--hf-checkpoint {source}: its config.json has no quantization_config of FP8 blocks "
            "(quant_method fp8 with a weight_block_size), so there is nothing to convert."
        )
    folder = CheckpointFolder(source)
    names = folder.names

    def convert(file: Path) -> dict[str, Tensor]:
        return {
            name: folder.read(name).bfloat16() if folder.is_fp8(name) else folder.read(name)
            for name in tensor_names(file)
            if name in names
        }

    staging = _write(source, target, convert)
    _finish(source, staging, target, {key: config[key] for key in config if key != "quantization_config"})


def _write(source: Path, target: Path, convert: Callable[[Path], dict[str, Tensor]]) -> Path:
    """Write each file of weights, converted, and the index to a folder next to `target`; return it."""
    files = model_files(source)
    if not files:
        raise ValueError(
            f"--hf-checkpoint {source} holds no safetensors: save the model again with save_pretrained."
        )
    if absent := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"--hf-checkpoint {source}: {INDEX} names {', '.join(absent)}, which is not there.")
    for file in files:
        tensor_names(file)  # reports damage before anything is written
    staging = target.with_name(target.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    for file in files:
        if tensors := convert(file):
            write_tensors(staging / file.name, tensors)
        weight_map.update(dict.fromkeys(tensors, file.name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(set(weight_map.values())) > 1 or (source / INDEX).is_file():
        write_index(staging, weight_map, total)
    return staging


def _finish(source: Path, staging: Path, target: Path, config: dict[str, Any]) -> None:
    (staging / "config.json").write_text(json.dumps(config, indent=2))
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
