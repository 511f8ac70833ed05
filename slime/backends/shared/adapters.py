"""Low-rank adapters in peft's format: names, initial values, config and folder, for both trainers."""

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.arguments import Args
from slime.utils.files.safetensors_files import write_tensors

NAME = "default"  # peft's default name of an adapter
ALL_LINEAR = ["all-linear"]


def first_factor(layer: str, shape: tuple[int, int], seed: int) -> Tensor:
    """Return the whole first factor at the start, drawn from --seed and the layer's name alone. The second is
    zero, so that the model starts unchanged, whichever ranks hold which part.
    """
    digest = hashlib.sha256(f"{seed} {layer}.lora_A.{NAME}.weight".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


def saved_name(layer: str, factor: str) -> str:
    """Return the name under which peft saves a factor of a layer's adapter."""
    return f"base_model.model.{layer}.{factor}.weight"


def adapter_config(args: Args, names: Iterable[str]) -> dict[str, Any]:
    """Return the config that peft writes for the adapters called `names`."""
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


def write_adapter(path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a folder that peft reads, with whole tensors under peft's names."""
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / "adapter_model.safetensors", tensors)
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2))
