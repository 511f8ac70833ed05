"""Megatron's optimizers under our flags, with the learning rate schedule of all backends."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

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
    """Build Megatron's optimizer, with weight decay on matrices only, which its scheduler would otherwise
    set. Megatron's offloading needs TransformerEngine and steps on the CPU, so slime's is used in both
    trainers.
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
    """Step with torch's fused AdamW. Megatron uses the one over lists of tensors, which needs another copy of
    all parameters and several times the memory traffic.
    """
    for member in members(optimizer):
        if isinstance(member.optimizer, torch.optim.AdamW):
            for group in member.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
            member.optimizer.step = FusedStep(member.optimizer)  # type: ignore[method-assign]


class FusedStep:
    """`step` of torch's fused AdamW for parameters of one kind on one device.

    torch groups thousands of tensors by kind in each step, while the device is idle; here this is done once.
    """

    def __init__(self, adam: torch.optim.AdamW) -> None:
        self._adam, self._theirs = adam, adam.step
        self.shrink: float | None = None  # divisor that the kernel applies to gradients

    @torch.no_grad()
    def __call__(self, closure: None = None) -> None:
        """Take one step; with torch's own code if a parameter has no gradient or no moments yet."""
        groups = self._adam.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        states, grads = self._states(parameters), [parameter.grad for parameter in parameters]
        plain = not any(group["amsgrad"] or group["maximize"] for group in groups)
        if not (plain and grads and all(states) and all(grad is not None for grad in grads)):
            if self.shrink is not None and (found := [grad for grad in grads if grad is not None]):
                torch._foreach_div_(found, self.shrink)
            self._theirs()
            return
        names = ("exp_avg", "exp_avg_sq", "step")
        whole = [parameters, grads, *([state[name] for state in states] for name in names)]
        scale = None
        if self.shrink is not None:
            scale = torch.full((), self.shrink, dtype=torch.float32, device=grads[0].device)
        begin = 0
        for group in groups:
            end = begin + len(group["params"])
            if end > begin:
                self._step_group(group, scale, *(members[begin:end] for members in whole))
            begin = end

    def _states(self, parameters: list[Tensor]) -> list[dict[str, Tensor]]:
        found = self._adam.state
        if len(found) == len(parameters) and all(map(operator.is_, found, parameters)):
            return list(found.values())
        return [found.get(parameter, {}) for parameter in parameters]  # slower: it hashes each of them

    @staticmethod
    def _step_group(group: dict[str, Any], scale: Tensor | None, *lists: list[Tensor]) -> None:
        parameters, grads, first, second, steps = lists
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters,
            grads,
            first,
            second,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
        )


def members(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Return Megatron's optimizers inside a chain that hold parameters on this rank."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if member.optimizer is not None and not getattr(member, "is_stub_optimizer", False):
            yield member


def main_copies(member: MegatronOptimizer) -> list[Tensor]:
    """Return the fp32 copies of 16-bit weights, whole or this rank's shards; none if weights are fp32."""
    names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
    return [copy for name in names for group in getattr(member, name, ()) for copy in group]


@contextmanager
def present(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Keep fp32 copies from host memory on the device within this block."""
    with ExitStack() as stack:
        for member in members(optimizer):
            if isinstance(member.optimizer, PlacedAdamW):
                stack.enter_context(member.optimizer.present())
        yield


def reload_copies(optimizer: MegatronOptimizer) -> None:
    """Set the fp32 copies to the model's weights."""
    with present(optimizer):
        optimizer.reload_model_params()


@torch.no_grad()
def step(optimizer: MegatronOptimizer, grad_norm: float, clip_grad: float) -> None:
    """Clip and apply the gradients after `prepare_grads`."""
    too_long = (grad_norm + _EPSILON) / clip_grad if 0 < clip_grad < grad_norm + _EPSILON else None
    for member in members(optimizer):
        if isinstance(member.optimizer.step, FusedStep):
            member.optimizer.step.shrink = too_long
        elif too_long and (grads := [p.grad for p in member.get_parameters() if p.grad is not None]):
            torch._foreach_div_(grads, too_long)
    with present(optimizer):
        optimizer.step_with_ready_grads()


def move_buffer(
    buffer: _ParamAndGradBuffer, device: torch.device, away: dict[int, int], host: HostMemory
) -> None:
    """Put Megatron's flat parameters on a device; its gradients have no storage while they are away.

    Parameters and gradients are views of the two flat tensors, so only these two change their storage. `away`
    remembers the sizes of those without.
    """
    if buffer.param_data is None:
        raise ValueError(
            "the trainer cannot leave its GPU without --use-distributed-optimizer: only there parameters "
            "are one buffer."
        )
    for flat, keep in ((buffer.param_data, True), (buffer.grad_data, False)):
        move_storage(flat, device, away, host, keep=keep)


def move_storage(
    tensor: Tensor, device: torch.device, away: dict[int, int], host: HostMemory, *, keep: bool = True
) -> None:
    """Move one tensor for `move_buffer`; `keep`: its values return with it, otherwise it is zero then."""
    storage = tensor.untyped_storage()
    key, nbytes = storage._cdata, storage.nbytes()
    if device.type == "cpu" and nbytes:
        away[key] = nbytes
        if keep:
            host.keep_storage(key, storage)
        storage.resize_(0)
    elif device.type != "cpu" and key in away:
        storage.resize_(away.pop(key))
        if keep:
            host.give_back_storage(key, storage)
        else:
            tensor.zero_()


def move_state(optimizer: MegatronOptimizer, device: torch.device, host: HostMemory) -> None:
    """Put the moments and fp32 parameters of every optimizer in the chain on a device."""
    for member in members(optimizer):
        for parameter in _own_copies(member):
            parameter.data = host.move((parameter, "value"), parameter.data, device)
        if isinstance(member.optimizer, PlacedAdamW):
            member.optimizer.move(device, host)
        else:
            host.move_state(member.optimizer, device)


def _own_copies(member: MegatronOptimizer) -> Iterator[Tensor]:
    """The fp32 parameters of an optimizer that move by themselves, wherever they are now."""
    parked = member.optimizer.parked if isinstance(member.optimizer, PlacedAdamW) else ()
    for group in member.optimizer.param_groups:
        for parameter in group["params"]:
            # A view of the model's own buffer (fp32 training) moves with that, and may be without memory
            # already; in host memory all are views.
            is_own = parameter.is_cpu or 0 < parameter.untyped_storage().nbytes() <= parameter.nbytes
            if parameter.dtype == torch.float32 and is_own and parameter not in parked:
                yield parameter
