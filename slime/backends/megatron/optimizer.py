"""Megatron's optimizers under our flags, with the learning rate schedule of all backends."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from slime.backends.shared.host_memory import HostMemory
from slime.backends.shared.placed_adam import MomentPlan, PlacedAdamW

_EPSILON = 1e-6  # as Megatron clips


def build_optimizer(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel], moments: MomentPlan, *, cpu: bool
) -> MegatronOptimizer:
    """Megatron's optimizer; weight decay is on matrices only, which its own scheduler would set.

    Its own way of offloading needs TransformerEngine and steps on the CPU; both trainers have the same one.
    """
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=not cpu)
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    if config.optimizer == "adam" and not moments.is_plain:
        for member in members(optimizer):
            member.optimizer = PlacedAdamW(member.optimizer.param_groups, moments)
            member.optimizer.park(main_copies(member))
    else:
        _fuse(optimizer)
    return optimizer


def _fuse(optimizer: MegatronOptimizer) -> None:
    """Step with torch's fused AdamW.

    Megatron takes the one over lists of tensors, which needs another copy of all parameters and several times
    the memory traffic.
    """
    for member in members(optimizer):
        if isinstance(member.optimizer, torch.optim.AdamW):
            for group in member.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def members(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Megatron's optimizers inside a chain that hold parameters on this rank."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if member.optimizer is not None and not getattr(member, "is_stub_optimizer", False):
            yield member


def main_copies(member: MegatronOptimizer) -> list[Tensor]:
    """The fp32 copies of 16-bit weights, whole or this rank's shards; none where weights are fp32."""
    names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
    return [copy for name in names for group in getattr(member, name, ()) for copy in group]


@contextmanager
def present(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Inside, fp32 copies that lie in host memory are on the device."""
    with ExitStack() as stack:
        for member in members(optimizer):
            if isinstance(member.optimizer, PlacedAdamW):
                stack.enter_context(member.optimizer.present())
        yield


def reload_copies(optimizer: MegatronOptimizer) -> None:
    """Take the fp32 copies from the model's weights."""
    with present(optimizer):
        optimizer.reload_model_params()


@torch.no_grad()
def step(optimizer: MegatronOptimizer, grad_norm: float, clip_grad: float) -> None:
    """Clip and apply the gradients that `prepare_grads` has made ready."""
    for member in members(optimizer):
        gradients = [p.grad for p in member.get_parameters() if p.grad is not None]
        if 0 < clip_grad < grad_norm + _EPSILON and gradients:
            torch._foreach_mul_(gradients, clip_grad / (grad_norm + _EPSILON))
    with present(optimizer):
        optimizer.step_with_ready_grads()


def move_buffer(
    buffer: _ParamAndGradBuffer, device: torch.device, away: dict[int, tuple[Tensor | None, int]]
) -> None:
    """Put Megatron's flat parameters on a device; its gradients have no storage while they are away.

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
        move_storage(flat, device, away, keep=keep)


def move_storage(
    tensor: Tensor,
    device: torch.device,
    away: dict[int, tuple[Tensor | None, int]],
    *,
    keep: bool = True,
) -> None:
    """The part of `move_buffer` for one tensor; `keep`: its values return with it."""
    storage = tensor.untyped_storage()
    key, nbytes = storage._cdata, storage.nbytes()
    if device.type == "cpu" and nbytes:
        away[key] = (tensor.to("cpu", copy=True) if keep else None, nbytes)
        storage.resize_(0)
    elif device.type != "cpu" and key in away:
        kept, nbytes = away.pop(key)
        storage.resize_(nbytes)
        if kept is not None:
            tensor.copy_(kept)
        else:
            tensor.zero_()


def move_state(optimizer: MegatronOptimizer, device: torch.device, host: HostMemory) -> None:
    """Put the moments and fp32 parameters of every optimizer in the chain on a device."""
    for member in members(optimizer):
        placed = member.optimizer if isinstance(member.optimizer, PlacedAdamW) else None
        for group in member.optimizer.param_groups:
            for parameter in group["params"]:
                if placed and parameter in placed.parked:
                    continue
                # A view of the model's own buffer (fp32 training) moves with that.
                own_storage = parameter.untyped_storage().nbytes() <= parameter.nbytes
                if parameter.dtype == torch.float32 and own_storage:
                    parameter.data = parameter.data.to(device)
        if placed:
            placed.move(device, host)
            continue
        for state in member.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)
