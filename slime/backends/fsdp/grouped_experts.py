"""Replaces the experts of a transformers model with slime's operator, if it supports the family."""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.experts.experts_operator import gated_experts
from slime.backends.fp8.linear import check_device
from slime.backends.fp8.scaling import ALIGNMENT
from slime.backends.fsdp.expert_parallel import is_experts
from slime.backends.fsdp.families import has_experts
from slime.backends.fsdp.layer_execution import HFModel

# Attributes of a family's experts in transformers: gate and up in one matrix, no bias, no norm after them. A
# release that does not say one of these knows no family where it is otherwise.
_PLAIN = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}
_SILU = ("SiLU", "SiLUActivation")
# Largest difference of FP8 experts between a GPU and a CPU: 16-bit steps may move numbers to the next of FP8.
_TOLERANCE = 0.05


def use_operator(lm: HFModel) -> None:
    """Run the layers' experts by `gated_experts` in 16-bit passes on a GPU."""
    for module in lm.modules():
        if computes_same(module):
            module.forward = types.MethodType(_forward, module)


def use_fp8(lm: HFModel, layers: list[nn.Module], device: torch.device) -> None:
    """Run the layers' experts by `gated_experts` in FP8; experts that it cannot compute are a ValueError."""
    if replace_experts(lm, layers, _forward_fp8, "--fp8-training", ALIGNMENT):
        check_device(device, _small_mixture, _TOLERANCE)


def replace_experts(
    lm: HFModel, layers: list[nn.Module], forward: Callable[..., Tensor], flag: str, multiple: int
) -> bool:
    """Replace the forward pass of all experts; False: there are none. ValueError: some are of another kind.

    `multiple`: what divides the sizes of their matrices.
    """
    kind = lm.config.model_type
    stacked: list[Any] = [module for layer in layers for module in layer.modules() if _is_stacked(module)]
    if not stacked or not has_experts(lm.config.get_text_config()):
        return False
    for module in stacked:
        if not computes_same(module):
            raise ValueError(
                f"{flag}: {type(module).__name__} of {kind} is not silu(gate) * up between two products "
                "without bias, which is what slime computes; remove it."
            )
        width, inner = module.down_proj.shape[1:]
        if width % multiple or inner % multiple:
            raise ValueError(
                f"{flag}: the experts of {kind} are {width} x {inner}, and multiples of {multiple} are "
                "needed; remove it."
            )
        module.forward = types.MethodType(forward, module)
    return True


def _is_stacked(module: Any) -> bool:
    own = module.parameters(recurse=False)
    return not isinstance(module, nn.Conv1d) and any(parameter.dim() == 3 for parameter in own)


def _small_mixture(matrix: Tensor) -> list[Tensor]:
    """Return the output and the gradients of two experts whose tokens are the rows of `matrix` [72, 64]."""
    hidden = matrix.bfloat16().requires_grad_()
    gate_up = hidden.detach()[:64].expand(2, -1, -1).contiguous().requires_grad_()
    down = hidden.detach()[:64, :32].expand(2, -1, -1).contiguous().requires_grad_()
    chosen, weights = (matrix[:, :1] > 0.5).long(), matrix[:, 1:2].bfloat16()
    out = gated_experts(hidden, gate_up, down, chosen, weights, fp8=True)
    return [out, *torch.autograd.grad(out, [hidden, gate_up, down], matrix.bfloat16())]


def covers(lm: HFModel) -> bool:
    """Return whether the operator can compute all mixtures of experts of the model; true of dense models."""
    found = [computes_same(module) for module in lm.modules() if is_experts(module)]
    return all(found) and bool(found) == has_experts(lm.config.get_text_config())


def keep_out_of_compiling(layers: list[nn.Module]) -> None:
    """Exclude routers and experts from compilation: router hooks differ by layer, and each difference would
    compile the layer once more.
    """
    functions: dict[type, Any] = {}
    for layer in layers:
        for block in layer.modules():
            if any(is_experts(child) for child in block.children()):
                plain = functions.setdefault(type(block), torch.compiler.disable(type(block).forward))
                block.forward = types.MethodType(plain, block)


def computes_same(module: nn.Module) -> bool:
    """Return whether a module's own code is silu(gate) * up between two plain products per expert."""
    said = vars(module)
    if not is_experts(module) or "has_gate" not in said:
        return False
    if any(said.get(name, value) != value for name, value in _PLAIN.items()):
        return False
    gating = getattr(type(module), "_apply_gate", None)
    is_default = getattr(gating, "__name__", "") == "_default_apply_gate"
    return is_default and type(vars(module).get("act_fn") or module._modules.get("act_fn")).__name__ in _SILU


def _forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    if not (hidden.is_cuda and hidden.dtype == torch.bfloat16 and type(experts.gate_up_proj) is nn.Parameter):
        return type(experts).forward(experts, hidden, chosen, weights)
    return gated_experts(hidden, experts.gate_up_proj, experts.down_proj, chosen, weights)


def _forward_fp8(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return gated_experts(hidden, experts.gate_up_proj, experts.down_proj, chosen, weights, fp8=True)
