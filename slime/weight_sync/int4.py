"""Converts weights for an INT4 model (W4A16): which become INT4, and a stream of tensors as it holds them.

The experts of a mixture become INT4, else all linear layers. The trainer rounds the same weights in its
forward pass (`slime/backends/fsdp/int4_training.py`).
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.catalog.engines import ENGINES
from slime.utils.files.safetensors_files import files_by_tensor
from slime.utils.models.int4_groups import GROUP, dequantize_groups, pack, quantize_groups
from slime.weight_sync.fp8 import _EMBEDDING, _NEVER, Converter

_WEIGHT = ".weight"
_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")


def int4_names(folder: str | Path) -> frozenset[str]:
    """Return the weights of a 16-bit checkpoint that become INT4, if they are matrices."""
    names = files_by_tensor(Path(folder))
    experts = frozenset(name for name in names if _EXPERT.search(name))
    if not experts and any(".experts." in name for name in names):
        raise ValueError(f"{folder} keeps the experts of a layer in one tensor: they cannot become INT4.")
    linear = (name for name in names if name.endswith(_WEIGHT))
    return experts or frozenset(name for name in linear if not _NEVER.search(name.removesuffix(_WEIGHT)))


def quantize_named(
    named: Iterable[tuple[str, Tensor]], names: frozenset[str], *, packed: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with the weights `names` in INT4: packed, or as the values that an engine reads."""
    for name, tensor in named:
        if name not in names or tensor.dim() != 2:
            yield name, tensor
            continue
        if tensor.shape[1] % GROUP:
            raise ValueError(
                f"{name} has rows of {tensor.shape[1]}: a scale of INT4 belongs to {GROUP} values."
            )
        values, scales = quantize_groups(tensor)
        if packed:
            yield f"{name}_packed", pack(values)
            yield f"{name}_scale", scales
            yield f"{name}_shape", torch.tensor(tensor.shape)
        else:
            yield name, dequantize_groups(values, scales, tensor.dtype)


def packed_config(folder: str | Path) -> dict[str, Any]:
    """Return the `quantization_config` of the checkpoint in a folder with its weights packed in INT4."""
    names = files_by_tensor(Path(folder))
    modules = {name.removesuffix(_WEIGHT) for name in names.keys() - int4_names(folder) if _WEIGHT in name}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(module for module in modules if not _EMBEDDING.search(module)),
    }


def make_converter(folder: str | Path, config: dict[str, Any] | None, _seed: int | None) -> Converter:
    """Return what converts tensors: packed for engines with this config, else to the values they mean."""
    names = int4_names(folder)
    return lambda named: list(quantize_named(named, names, packed=config is not None))


def engine_config(engine: str, folder: str | Path) -> dict[str, Any] | None:
    """Return the config of engines that hold INT4; None: they get 16-bit tensors with INT4's values."""
    if not ENGINES[engine].packs_int4:
        return None
    if not any(map(_EXPERT.search, int4_names(folder))):
        raise ValueError(
            "--rollout-quantization int4 with --rollout-engine sglang: of INT4 weights SGLang takes new ones "
            f"for experts only, and {folder} has none; use --rollout-engine embedded."
        )
    return packed_config(folder)
