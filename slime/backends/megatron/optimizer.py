"""Megatron's optimizers under our flags: one learning rate schedule for all
backends, steps only with finite gradients.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import nn


def build_optimizer(config: OptimizerConfig, chunks: Sequence[nn.Module], *, cpu: bool) -> Any:
    """Matrices decay, vectors do not. Megatron's own scheduler would apply
    `wd_mult`; we have none, so it is done here.
    """
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=not cpu)
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    if not cpu:
        _fuse(optimizer)
    return optimizer


def _fuse(optimizer: Any) -> None:
    """Megatron steps with torch's AdamW over lists of tensors, which takes another copy of all
    parameters and several times the memory traffic of torch's fused one."""
    for member in members(optimizer):
        if isinstance(member.optimizer, torch.optim.AdamW):
            for group in member.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def members(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers inside a chain that hold parameters on this rank."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if member.optimizer is not None and not getattr(member, "is_stub_optimizer", False):
            yield member


@torch.no_grad()
def step(optimizer: Any, grad_norm: float, clip_grad: float) -> None:
    """Clip and apply gradients that `prepare_grads` made ready."""
    for member in members(optimizer):
        if clip_grad > 0 and member.get_parameters():
            clip_grad_by_total_norm_fp32(member.get_parameters(), max_norm=clip_grad, total_norm=grad_norm)
    optimizer.step_with_ready_grads()


def move_buffer(buffer: Any, device: torch.device, away: dict[int, tuple[torch.Tensor | None, int]]) -> None:
    """Put Megatron's flat parameters on a device and leave its flat
    gradients without storage while they are away.

    Parameters and gradients are views of the two flat tensors, so only these two change their storage. `away`
    remembers those without storage: their values on the host (None: gradients, which start from zero) and
    their size.
    """
    if buffer.param_data is None:
        raise ValueError(
            "the trainer cannot leave its GPU without --use-distributed-optimizer: only there parameters "
            "are one buffer."
        )
    for flat, keep in ((buffer.param_data, True), (buffer.grad_data, False)):
        storage, nbytes = flat.untyped_storage(), flat.untyped_storage().nbytes()
        if device.type == "cpu" and nbytes:
            kept = flat.to("cpu") if keep else None
            away[id(flat)] = (kept, nbytes)
            storage.resize_(0)
        elif device.type != "cpu" and id(flat) in away:
            kept, nbytes = away.pop(id(flat))
            storage.resize_(nbytes)
            if kept is not None:
                flat.copy_(kept)
            else:
                flat.zero_()


def move_state(optimizer: Any, device: torch.device) -> None:
    """Moments and fp32 parameters of every optimizer in the chain."""
    for member in members(optimizer):
        for group in member.optimizer.param_groups:
            for parameter in group["params"]:
                # A view of the model's own buffer (fp32 training) moves with that.
                if (
                    parameter.dtype == torch.float32
                    and parameter.untyped_storage().nbytes() <= parameter.nbytes
                ):
                    parameter.data = parameter.data.to(device)
        for state in member.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device)
