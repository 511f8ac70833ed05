"""Muon for sharded models: torch's own mathematics, on whole matrices."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _adjust_lr
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalised

_COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
_SCALE = "match_rms_adamw"  # so that learning rates and weight decays of AdamW stay what they were
_MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for the matrices of hidden layers, and `torch.optim.AdamW` for all others.

    The orthogonalised update depends on the whole matrix. Every rank gathers it and computes the same;
    momentum stays sharded as the parameter is.
    """

    def __init__(self, matrices: dict[str, Any], others: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__([matrices], {"lr": settings["lr"], "weight_decay": 0.0})
        self.matrices = self.param_groups[0]
        self.adam = torch.optim.AdamW(others or [{"params": []}], fused=True, **settings)
        self.param_groups += self.adam.param_groups
        self.adam.state = self.state  # one state for those who save, move or reset it

    def create_state(self) -> None:
        """Create the momentum of matrices; `placed_adam.create_state` creates the rest."""
        for parameter in self.matrices["params"]:
            if not self.state[parameter]:
                self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.create_state()
        group = self.matrices
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            momentum = self.state[parameter]["momentum_buffer"]
            momentum.lerp_(parameter.grad, 1 - _MOMENTUM)
            update = _orthogonal(parameter.grad.lerp(momentum, _MOMENTUM))
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-_adjust_lr(group["lr"], _SCALE, parameter.shape[-2:]))
        self.adam.step()


def _orthogonal(update: Tensor) -> Tensor:
    """Return the orthogonalised matrix, or matrix of each expert, sharded as `update` is."""
    whole = update.full_tensor() if isinstance(update, DTensor) else update
    matrices = whole.view(-1, *whole.shape[-2:]).unbind()
    found = [orthogonalised(own, _COEFFICIENTS, DEFAULT_NS_STEPS, EPS) for own in matrices]
    whole = torch.stack(found).view(whole.shape)
    if not isinstance(update, DTensor):
        return whole
    mesh = update.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=update.placements)


def hidden_matrices(lm: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices of all layers between the embeddings and the output head."""
    layers: Any = [module for module in lm.modules() if isinstance(module, nn.Embedding)]
    outside = {id(layer.weight) for layer in (*layers, lm.get_output_embeddings())}  # type: ignore[operator]
    return [
        parameter
        for name, parameter in lm.named_parameters()
        if parameter.requires_grad
        and id(parameter) not in outside
        and (parameter.ndim == 2 or (parameter.ndim == 3 and "experts" in name))
    ]
