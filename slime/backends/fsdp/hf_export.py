"""Weights under their hub names: as a stream of buckets, and as a folder that `from_pretrained` reads.

Tied embeddings have one rule: the shared matrix travels once, under the input embedding's name.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slime.backends.base import Bucket
from slime.backends.fsdp import vision
from slime.backends.fsdp.layer_execution import HFModel
from slime.backends.fsdp.lora import merged
from slime.backends.shared.scalar_head import HEAD
from slime.utils.models.hub_names import hub_tensors, saved_tensors


def buckets(
    lm: HFModel, bucket_bytes: int, dtype: torch.dtype | None, *, scalar: bool = False
) -> Iterator[Bucket]:
    """Yield full tensors under hub names in buckets of at most `bucket_bytes` (a larger tensor is alone).

    `scalar`: the output layer is one row, of a critic or a reward model.
    """
    named = _hub_tensors(lm)
    if scalar:
        head = lm.get_output_embeddings().weight
        own = next(name for name, parameter in lm.named_parameters() if parameter is head)
        named = ((HEAD if name == own else name, tensor) for name, tensor in named)
    return in_buckets(named, bucket_bytes, dtype)


def in_buckets(
    named: Iterator[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None
) -> Iterator[Bucket]:
    """Group named tensors, cast to `dtype` if given, into buckets of at most `bucket_bytes`."""
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


def _hub_tensors(lm: HFModel) -> Iterator[tuple[str, Tensor]]:
    """Yield gathered tensors under their names in the original checkpoint."""
    known: frozenset[str] = vars(lm).get("hub_names", frozenset())  # set when the weights were read
    return hub_tensors(lm, merged(lm, saved_tensors(lm)), known)


def hub_shapes(config: Any) -> dict[str, torch.Size]:
    """Return name and shape of every tensor in a hub checkpoint of the model; a tied matrix has one name."""
    with torch.device("meta"):
        lm = vision.auto_class(config).from_config(copy.deepcopy(config))
    return {name: tensor.shape for name, tensor in _hub_tensors(lm)}
