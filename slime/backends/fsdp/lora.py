"""Low-rank adapters through peft: added before sharding, exported merged into the weights or alone."""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.arguments import Args
from slime.backends.fsdp.layers import HFModel
from slime.backends.fsdp.model import gather_full
from slime.utils.safetensors_files import write_tensors

NAME = "default"
# A layer that carries an adapter keeps its own weight under this name.
ADAPTED = ".base_layer."
_ADAPTERS = (".lora_A.", ".lora_B.")


def is_adapter(name: str) -> bool:
    return any(part in name for part in _ADAPTERS)


def hub_name(name: str) -> str:
    """The name in a checkpoint of a parameter that may have got an adapter."""
    return name.replace(ADAPTED, ".")


def add_adapters(args: Args, lm: HFModel) -> None:
    """Freeze the model, except for parameters that already have values such as a new head, and add adapters.

    The first factor is drawn from --seed and the layer's name, the second is zero: every rank has the same,
    and the model starts as it was.
    """
    if not args.lora_rank:
        return
    try:
        # An optional package: only runs with adapters need it.
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError("--lora-rank needs the package peft: install slime[lora].") from None
    heads = [parameter for parameter in lm.parameters() if not parameter.is_meta]
    targets = args.lora_target_modules
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(config, lm, adapter_name=NAME)
    for parameter in heads:
        parameter.requires_grad_(True)
    for name, parameter in list(lm.named_parameters()):
        if is_adapter(name):
            module = lm.get_submodule(name.rpartition(".")[0])
            module.weight = nn.Parameter(_first_value(name, parameter.shape, args.seed))


def _first_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


def merged(lm: HFModel, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors as a model without adapters names them, the adapters' products added; a collective."""
    for name, tensor in named:
        if is_adapter(name):
            continue
        full = gather_full(tensor)
        if name.endswith(ADAPTED + "weight"):
            layer = lm.get_submodule(name.removesuffix(ADAPTED + "weight"))
            a, b = (gather_full(part[NAME].weight.detach()).float() for part in (layer.lora_A, layer.lora_B))
            full = (full.float() + layer.scaling[NAME] * (b @ a)).to(full.dtype)
        yield hub_name(name), full


def adapter_tensors(lm: HFModel) -> Iterator[tuple[str, Tensor]]:
    """Whole adapter tensors under the names that peft saves them with; a collective."""
    for name, parameter in lm.named_parameters():
        if is_adapter(name):
            yield "base_model.model." + name.replace(f".{NAME}.", "."), gather_full(parameter.detach())


def adapter_config(args: Args, lm: HFModel) -> dict[str, Any]:
    """What peft writes beside adapters: how they were made, and for which layers."""
    names = (name for name, _ in lm.named_parameters() if is_adapter(name))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(args.hf_checkpoint),
        "r": args.lora_rank,
        "lora_alpha": args.lora_alpha,
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def save_adapter(args: Args, lm: HFModel, path: Path, rank: int) -> None:
    """Write the adapters alone, as peft reads them. All ranks call; the first writes."""
    tensors = {name: tensor.cpu() for name, tensor in adapter_tensors(lm)}
    if rank != 0:
        return
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / "adapter_model.safetensors", tensors)
    (path / "adapter_config.json").write_text(json.dumps(adapter_config(args, lm), indent=2))
