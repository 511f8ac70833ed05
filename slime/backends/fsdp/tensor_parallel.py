"""Tensor parallelism by the plan of each transformers family: splits matrices by columns or rows.

Embedding, norms, routers, vision tower and output matrix stay whole on every rank; their gradients are the
same on all ranks of the group, because incoming gradients are summed. Experts are distributed whole. Other
layouts of experts and other styles of plans are refused with an error.
"""

import re
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from slime.algorithms.model_parts import routers
from slime.backends.fsdp.expert_parallel import is_experts, share_out
from slime.backends.fsdp.families import has_experts
from slime.backends.fsdp.layer_execution import HFModel
from slime.backends.fsdp.lora import NAME as ADAPTER
from slime.backends.fsdp.vision import family_of, text_model

# Norms of single heads see only this rank's heads (dimension 2 of [1, T, heads, size]): gradients are summed.
_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
# Plan of the text model of vision-language families: transformers has none for Qwen3-VL.
_DENSE_TEXT = {
    **dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise"),
    **dict.fromkeys((f"layers.*.mlp.{name}_proj" for name in ("gate", "up")), "colwise"),
    **dict.fromkeys(("layers.*.self_attn.o_proj", "layers.*.mlp.down_proj"), "rowwise"),
}
# Parts of a layer with an adapter -> the layer's styles that split them.
_UNDER_ADAPTERS = {
    ".base_layer": (ColwiseParallel, RowwiseParallel),
    f".lora_A.{ADAPTER}": (RowwiseParallel,),
    f".lora_B.{ADAPTER}": (ColwiseParallel,),
}


def apply(lm: HFModel, mesh: DeviceMesh) -> None:
    """Split the decoder of `lm` over the one-dimensional `mesh`."""
    size, config = mesh.size(), lm.config.get_text_config()
    plan, experts = plan_of(lm, size)
    if unknown := sorted(set(plan.values()) - _STYLES.keys()):
        raise ValueError(
            f"--tensor-model-parallel-size {size}: the plan of {config.model_type} asks for {unknown[0]!r}, "
            "which slime does not support; use 1."
        )
    styles = {name: _STYLES[style] for name, style in plan.items()}
    base = text_model(lm)
    chosen: dict[str, ParallelStyle] = {}
    for name, module in base.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        general = re.sub(r"\d+", "*", name)
        if (style := _style_of(general, styles)) is not None:
            chosen[name] = style()
        elif general.endswith(("q_norm", "k_norm")):
            chosen[name] = _STYLES["replicated_with_grad_allreduce"]()
    trains = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    parallelize_module(base, mesh, chosen)
    for module in experts:
        share_out(module, mesh)
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(trains[name])  # some styles make new parameters, which would all train


def plan_of(lm: HFModel, size: int) -> tuple[dict[str, str], list[Any]]:
    """Return the style of each split module, and the modules with distributed experts; else a ValueError."""
    config = lm.config.get_text_config()
    known = config.base_model_tp_plan or {} if family_of(lm.config) is None else _DENSE_TEXT
    # Matrices outside the layers (embedding, output matrix) stay whole.
    plan = {
        name: style
        for name, style in known.items()
        if name.startswith("layers.") and ".experts" not in name  # experts are distributed instead
    }
    if not plan:
        raise ValueError(
            f"--tensor-model-parallel-size {size}: {config.model_type} has no plan for it in this version; "
            "use 1."
        )
    experts = [module for module in lm.modules() if is_experts(module)]
    if (has_experts(config) or routers(lm)) and not 0 < len(experts) == len(routers(lm)):
        raise ValueError(
            f"--tensor-model-parallel-size {size}: {config.model_type} keeps its experts in a way that this "
            "version cannot share out over ranks; use 1."
        )
    sizes = {
        name: getattr(config, name)
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    if experts:
        sizes["the number of experts"] = experts[0].num_experts
    for name, value in sizes.items():
        if value % size:
            raise ValueError(
                f"--tensor-model-parallel-size {size} does not divide {name} = {value} of "
                f"{config.model_type}: use a size that does."
            )
    return plan, experts


def _style_of(name: str, styles: dict[str, Any]) -> Any | None:
    """Return the style in which a matrix is split; None: it stays whole.

    The layer under an adapter is split as the plan says, and so is the adapter's matrix that has the split
    side of the layer. Gradients of the adapter's whole matrix arrive summed.
    """
    for suffix, cut_by in _UNDER_ADAPTERS.items():
        if name.endswith(suffix):
            style = styles.get(name.removesuffix(suffix))
            return style if style in cut_by else None
    return styles.get(name)


def is_cut(parameter: Any) -> bool:
    """Return whether the ranks of a tensor-parallel group hold different parts of the parameter."""
    mesh = getattr(parameter, "device_mesh", None)
    names = mesh.mesh_dim_names if mesh is not None else ()
    return "tensor" in names and not parameter.placements[names.index("tensor")].is_replicate()
