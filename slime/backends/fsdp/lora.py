"""Low-rank adapters through peft: added before sharding, exported merged into the weights or alone."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slime.arguments import Args
from slime.backends.fsdp.layer_execution import HFModel
from slime.backends.fsdp.model import gather_full
from slime.backends.fsdp.vision import tower_prefixes
from slime.backends.shared.adapters import ALL_LINEAR, NAME, first_factor, saved_name

# A layer with an adapter keeps its own weight under this name.
ADAPTED = ".base_layer."
_ADAPTERS = (".lora_A.", ".lora_B.")


def is_adapter(name: str) -> bool:
    return any(part in name for part in _ADAPTERS)


def hub_name(name: str) -> str:
    """Return the checkpoint's name of a parameter that may have an adapter."""
    return name.replace(ADAPTED, ".")


def add_adapters(args: Args, lm: HFModel) -> None:
    """Freeze the model, except for parameters that already have values such as a new head, and add adapters.

    Every rank has the same, and the model starts as it was. A vision tower is frozen and gets no adapters.
    """
    if not args.lora_rank:
        return
    try:
        # An optional package: only runs with adapters need it.
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError("--lora-rank needs the package peft: install slime-rl[lora].") from None
    heads = [parameter for parameter in lm.parameters() if not parameter.is_meta]
    targets = args.lora_target_modules
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules="all-linear" if targets == ALL_LINEAR else targets,
        exclude_modules=_tower_modules(lm),
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(config, lm, adapter_name=NAME)
    if config.target_parameters:
        raise ValueError(
            f"--lora-target-modules {' '.join(targets)}: in {lm.config.model_type} that includes experts or "
            "their router, which the FSDP trainer keeps as stacked tensors without adapters; name other "
            "layers, such as q_proj k_proj v_proj o_proj, or use --train-backend megatron."
        )
    for parameter in heads:
        parameter.requires_grad_(True)
    for name, parameter in list(lm.named_parameters()):
        if is_adapter(name):
            module = lm.get_submodule(name.rpartition(".")[0])
            layer, factor = name.removesuffix(f".{NAME}.weight").rsplit(".", 1)
            rows, columns = parameter.shape
            drawn = factor == "lora_A"
            first = first_factor(layer, (rows, columns), args.seed) if drawn else torch.zeros(rows, columns)
            module.weight = nn.Parameter(first)


def _tower_modules(lm: HFModel) -> str | None:
    """Return a pattern of the modules of the vision tower; None: the model reads text only."""
    prefixes = tower_prefixes(lm.config)
    return f"({'|'.join(map(re.escape, prefixes))}).*" if prefixes else None


def merged(lm: HFModel, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, named as without adapters, with the adapters' products added; a collective."""
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
    """Yield whole adapter tensors under the names that peft uses in files; a collective."""
    for name, parameter in lm.named_parameters():
        if is_adapter(name):
            layer, factor = name.removesuffix(f".{NAME}.weight").rsplit(".", 1)
            yield saved_name(layer, factor), gather_full(parameter.detach())
