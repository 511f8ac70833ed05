"""Megatron's optimizers under our flags: one learning rate schedule for all backends, steps only with finite gradients."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import nn


def build_optimizer(config: OptimizerConfig, chunks: Sequence[nn.Module], *, cpu: bool) -> Any:
    """Matrices decay, vectors do not. Megatron's own scheduler would apply `wd_mult`; we have none, so it is done here."""
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=not cpu)
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizer


def members(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers inside a chain that hold parameters on this rank."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if member.optimizer is not None and not getattr(member, "is_stub_optimizer", False):
            yield member


@torch.no_grad()
def step(optimizer: Any, grad_norm: float, clip_grad: float, rate: float) -> tuple[float, ...]:
    """Clip, set the rate and apply gradients that `prepare_grads` made ready; returns the rate per parameter group."""
    for member in members(optimizer):
        if clip_grad > 0 and member.get_parameters():
            clip_grad_by_total_norm_fp32(member.get_parameters(), max_norm=clip_grad, total_norm=grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step_with_ready_grads()
    return tuple(group["lr"] for group in optimizer.param_groups)
