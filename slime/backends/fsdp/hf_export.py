"""Weights under their hub names: as a stream of buckets, and as a folder that `from_pretrained` reads.

Tied embeddings have one rule: the shared matrix travels once, under the input embedding's name.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.base import Bucket
from slime.backends.fsdp.layers import HFModel
from slime.backends.fsdp.lora import merged
from slime.backends.shared import hf_folder


def named_tensors(lm: HFModel) -> Iterator[tuple[str, Tensor]]:
    """In-memory (name, possibly sharded tensor) of parameters and saved buffers; a tied matrix comes once."""
    yield from ((name, parameter.data) for name, parameter in lm.named_parameters())
    for module_name, module in lm.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{module_name}.{name}" if module_name else name), buffer


def buckets(lm: HFModel, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[Bucket]:
    """Full tensors under hub names in buckets of at most `bucket_bytes` (a larger tensor stands alone)."""
    return in_buckets(_hub_tensors(lm), bucket_bytes, dtype)


def in_buckets(
    named: Iterator[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None
) -> Iterator[Bucket]:
    """Named tensors, cast to `dtype` where one is given, in buckets of at most `bucket_bytes`."""
    bucket: Bucket = []
    size = 0
    for name, tensor in named:
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


# Where checkpoints of models that also see or hear keep the text model, and transformers' text model its own.
NESTED, TEXT = "model.language_model.", "model."


def _hub_tensors(lm: HFModel) -> Iterator[tuple[str, Tensor]]:
    """Gathered tensors under the names of the checkpoint that they came from."""
    known: frozenset[str] = vars(lm).get("hub_names", frozenset())  # set where the weights were read
    nested = any(name.startswith(NESTED) for name in known) and not any(
        name.startswith(NESTED) for name, _ in lm.named_parameters()
    )

    def hub_name(name: str) -> str:
        return NESTED + name.removeprefix(TEXT) if nested and name.startswith(TEXT) else name

    for name, tensor in _reverted(lm, lambda name: hub_name(name) in known):
        yield hub_name(name), tensor


def _reverted(lm: HFModel, is_hub_name: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Tensors renamed and split as the hub has them, but for those that it has as they are. Families that
    transformers fuses in memory are reverted a decoder layer at a time: no hub tensor spans two layers.
    """
    if not is_converted(lm):
        yield from merged(lm, named_tensors(lm))
        return
    # Only present in transformers 5, and only needed for fused families.
    from transformers.core_model_loading import revert_weight_conversion

    layer: dict[str, Tensor] = {}
    current = None
    for name, tensor in merged(lm, named_tensors(lm)):
        key = _layer_of(name)
        if key != current and layer:
            yield from revert_weight_conversion(lm, layer).items()
            layer = {}
        current = key
        if is_hub_name(name):
            yield name, tensor
        else:
            layer[name] = tensor
    if layer:
        yield from revert_weight_conversion(lm, layer).items()


def hub_shapes(config: Any) -> dict[str, torch.Size]:
    """Name and shape of every tensor in a hub checkpoint of such a model; a tied matrix has one name."""
    # Heavy import, only needed where a model is built.
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return {name: tensor.shape for name, tensor in _hub_tensors(lm)}


def is_converted(lm: HFModel) -> bool:
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
    lm: HFModel,
    path: Path,
    source: str,
    bucket_bytes: int,
    dtype: torch.dtype | None,
    rank: int,
    *,
    scalar: bool = False,
) -> None:
    """Write the model next to `path`, then rename. `scalar`: its output layer is a reward model's one row."""
    # Heavy import, only needed where a model is saved.
    from transformers import AutoConfig

    dtype = dtype or AutoConfig.from_pretrained(source).dtype or torch.float32
    stream = buckets(lm, bucket_bytes, dtype)
    if scalar:
        head = lm.get_output_embeddings().weight
        own = next(name for name, parameter in lm.named_parameters() if parameter is head)
        stream = (
            [("score.weight" if name == own else name, tensor) for name, tensor in bucket]
            for bucket in stream
        )
    hf_folder.save(stream, path, source, dtype, rank, scalar=scalar)
