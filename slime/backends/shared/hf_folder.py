"""Writes a folder for `from_pretrained` from a stream of weight buckets, atomically."""

import itertools
import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.base import Bucket
from slime.utils.files.safetensors_files import (
    SINGLE,
    all_files,
    read_tensors,
    tensor_names,
    write_index,
    write_tensors,
)
from slime.utils.models.fp8_blocks import SCALE_SUFFIX, dequantize_blocks
from slime.utils.models.hub_names import folder_of
from slime.utils.models.model_config import block_size_of

logger = logging.getLogger(__name__)

# Files of the tokenizer, and of a model's own code, whose modules its configuration names.
_BESIDE_WEIGHTS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template.*", "*processor_config.json", "*.py"),
)
# Names of tensors that a trainer did not build: MTP heads (multi-token prediction), vision, audio.
_UNBUILT = re.compile(r"(^|\.)(mtp|nextn|visual|vision|audio|embed_vision|embed_audio|multi_modal)\w*\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def dtype_of(source: str) -> torch.dtype:
    """Return the dtype in which the model of a folder or hub id was saved."""
    # Heavy import, only needed where a model is saved.
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source).dtype or torch.float32


def save(
    buckets: Iterator[Bucket], path: Path, source: str, dtype: torch.dtype, rank: int, *, scalar: bool = False
) -> None:
    """Write config, generation config, tokenizer and safetensors next to `path`, then rename. Rank 0 writes.

    `source` is the HF model the weights were trained from; all ranks walk through `buckets`. With `scalar`
    the weights are those of a sequence classification with one label: a reward model.
    """
    # Heavy import, only needed where a model is saved.
    from transformers import AutoConfig, GenerationConfig

    temporary = path.with_name(path.name + ".tmp")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    files: list[dict[str, int]] = []
    for bucket in buckets:
        if rank == 0:
            files.append(_write_bucket(temporary / f"part-{len(files)}", bucket))
    if rank == 0:
        config = AutoConfig.from_pretrained(source)
        if not scalar and (
            heads := unbuilt_heads(source, config, (name for file in files for name in file), dtype)
        ):
            files.append(_write_bucket(temporary / f"part-{len(files)}", heads))
        _name_files(temporary, files)
        config.dtype = dtype
        # The saved weights are never quantised, even if the source is.
        config.__dict__.pop("quantization_config", None)
        if scalar:
            config.num_labels = 1
            config.architectures = [
                n.replace("ForCausalLM", "ForSequenceClassification") for n in config.architectures
            ]
        config.save_pretrained(temporary)
        if (Path(source) / "generation_config.json").is_file() or not Path(source).is_dir():
            GenerationConfig.from_pretrained(source).save_pretrained(temporary)
        _copy_other_files(source, temporary)
        _replace(temporary, path)
    dist.barrier()


def _write_bucket(file: Path, bucket: Bucket) -> dict[str, int]:
    write_tensors(file, dict(bucket))
    return {name: tensor.nbytes for name, tensor in bucket}


def _name_files(folder: Path, files: list[dict[str, int]]) -> None:
    """Name the files: one is model.safetensors; several get numbers and an index."""
    if len(files) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, sizes in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{i}").rename(folder / name)
        weight_map.update(dict.fromkeys(sizes, name))
    total = sum(sum(sizes.values()) for sizes in files)
    write_index(folder, weight_map, total)


def _copy_other_files(source: str, folder: Path) -> None:
    if Path(source).is_dir():
        for file in (file for pattern in _BESIDE_WEIGHTS for file in Path(source).glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        return
    # A hub id: transformers finds the files in its cache.
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _replace(new: Path, path: Path) -> None:
    """Rename `new` to `path`; an older folder there moves aside first, to a free name, and is removed."""
    if not path.exists():
        new.rename(path)
        return
    old = next(
        name for i in itertools.count(1) if not (name := path.with_name(f"{path.name}.old-{i}")).exists()
    )
    path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def is_mtp_head(name: str, num_layers: int) -> bool:
    """Return whether a hub tensor belongs to an MTP head, by its name or as a layer after the last one."""
    layer = _LAYER.search(name)
    return bool(_UNBUILT.search(name)) or (layer is not None and int(layer[2]) >= num_layers)


def unbuilt_heads(source: str, config: Any, written: Iterable[str], dtype: torch.dtype) -> Bucket:
    """Yield tensors of unbuilt parts of `source` that were not `written`, as `dtype`.

    Without them the config of a saved folder would name tensors that the folder does not contain.
    """
    num_layers, written = config.get_text_config().num_hidden_layers, set(written)
    folder = folder_of(source)
    files, block = all_files(folder), block_size_of(folder)
    names = {name for file in files for name in tensor_names(file) if is_mtp_head(name, num_layers)}
    tensors = dict(read_tensors(files, names - written))
    found: Bucket = []
    for name, tensor in tensors.items():
        if block is not None and name.endswith(SCALE_SUFFIX):
            continue
        if block is not None and (scale := tensors.get(name + SCALE_SUFFIX)) is not None:
            tensor = dequantize_blocks(tensor, scale, block, dtype)
        # Hub checkpoints keep this bias in fp32, because its last bits decide the choice of experts.
        keeps = not tensor.is_floating_point() or name.endswith("e_score_correction_bias")
        found.append((name, tensor if keeps else tensor.to(dtype)))
    if found:
        parts = "parts that were not trained (MTP heads, vision, audio)"
        logger.info("%d tensors of %s are copied from %s", len(found), parts, source)
    return found
