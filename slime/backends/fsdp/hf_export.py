"""Weights under their hub names: as a stream of buckets, and as a folder that `from_pretrained` reads.

Tied embeddings have one rule: the shared matrix travels once, under the input embedding's name.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.backends.base import Bucket
from slime.backends.fsdp.model import gather_full

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def named_tensors(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """In-memory (name, possibly sharded tensor) of parameters and saved buffers; a tied matrix comes once."""
    yield from ((name, parameter.data) for name, parameter in lm.named_parameters())
    for module_name, module in lm.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{module_name}.{name}" if module_name else name), buffer


def buckets(lm: nn.Module, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[Bucket]:
    """Full tensors under hub names in buckets of at most `bucket_bytes` (a larger tensor stands alone)."""
    bucket: Bucket = []
    size = 0
    for name, tensor in _hub_tensors(lm):
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        tensor = tensor.detach().contiguous()
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _hub_tensors(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gathered tensors, renamed and split as the hub checkpoint has them. Families that transformers fuses in memory are
    reverted a decoder layer at a time, because one hub tensor never spans two layers."""
    if not _is_converted(lm):
        for name, tensor in named_tensors(lm):
            yield name, gather_full(tensor)
        return
    # Only present in transformers 5, and only needed for fused families.
    from transformers.core_model_loading import revert_weight_conversion

    layer: dict[str, Tensor] = {}
    current = None
    for name, tensor in named_tensors(lm):
        key = _layer_of(name)
        if key != current and layer:
            yield from revert_weight_conversion(lm, layer).items()
            layer = {}
        current = key
        layer[name] = gather_full(tensor)
    if layer:
        yield from revert_weight_conversion(lm, layer).items()


def _is_converted(lm: nn.Module) -> bool:
    # Only present in transformers 5; dense families have no conversions.
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(lm, add_legacy=False))


def _layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; the name itself outside of layers."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return name


def save_folder(
    lm: nn.Module, path: Path, source: str, bucket_bytes: int, dtype: torch.dtype | None, rank: int
) -> None:
    """Write config, generation config, tokenizer and safetensors next to `path`, then rename. Rank 0 writes."""
    # Heavy import, only needed where a model is saved.
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    dtype = dtype or config.dtype or torch.float32
    temporary = path.with_name(path.name + ".tmp")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    files: list[dict[str, int]] = []
    for bucket in buckets(lm, bucket_bytes, dtype):
        if rank == 0:
            files.append(_write_bucket(temporary / f"part-{len(files)}", bucket))
    if rank == 0:
        _name_files(temporary, files)
        config.dtype = dtype
        config.save_pretrained(temporary)
        if lm.generation_config is not None:
            lm.generation_config.save_pretrained(temporary)
        _copy_tokenizer(source, temporary)
        _replace(temporary, path)
    dist.barrier()


def _write_bucket(file: Path, bucket: Bucket) -> dict[str, int]:
    from safetensors.torch import save_file  # with transformers, only needed here

    tensors = {name: tensor.cpu() for name, tensor in bucket}
    save_file(tensors, file, metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _name_files(folder: Path, files: list[dict[str, int]]) -> None:
    """One file is model.safetensors; several get numbers and an index."""
    if len(files) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, sizes in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{i}").rename(folder / name)
        weight_map.update(dict.fromkeys(sizes, name))
    total = sum(sum(sizes.values()) for sizes in files)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _copy_tokenizer(source: str, folder: Path) -> None:
    if Path(source).is_dir():
        for name in TOKENIZER_FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)
        return
    # A hub id: transformers finds the files in its cache.
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _replace(new: Path, path: Path) -> None:
    """Rename `new` to `path`; an older folder there is moved aside first and removed after."""
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)
