"""Lets megatron-core 0.16.1 update all parameters in few kernels without TransformerEngine and Apex.

Megatron's own fallbacks launch kernels for each parameter, and the fallback of the norm synchronises with the
device each time: a fifth of a step of a mixture of experts, which has thousands of parameters.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.shared.gradient_sums import add_gradient_

_PAIRS = "_slime_pairs"  # attribute of an optimizer: pairs of tensors that each step copies
_COUNTED = "_slime_counted"  # attribute of an optimizer: for each parameter, whether its gradient counts
_EMPTY = "_slime_empty"  # attribute of a parameter: the sum of its gradients is still zero
_RUNS = "_slime_runs"  # attribute of an optimizer: gradients that count, and the same numbers in few tensors


def install() -> None:
    """Replace missing kernels by these, once per process; kernels of other packages are kept."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of_list
    if DistributedOptimizer._copy_main_params_to_model_params is not copy_parameters:
        _THEIRS["parameters"] = DistributedOptimizer._copy_main_params_to_model_params
        _THEIRS["gradients"] = DistributedOptimizer._copy_model_grads_to_main_grads
        DistributedOptimizer._copy_main_params_to_model_params = copy_parameters
        DistributedOptimizer._copy_model_grads_to_main_grads = copy_gradients
        _THEIRS["counted"] = DistributedOptimizer.get_main_grads_for_grad_norm
        DistributedOptimizer.get_main_grads_for_grad_norm = counted_gradients
        _THEIRS["hook"] = DistributedDataParallel._make_backward_post_hook
        DistributedDataParallel._make_backward_post_hook = backward_hook
        _THEIRS["zero"] = DistributedDataParallel.zero_grad_buffer
        DistributedDataParallel.zero_grad_buffer = zero_gradients


_THEIRS: dict[str, Any] = {}


def norm_of_list(
    _chunk_size: int, _noop: Tensor, lists: list[list[Tensor]], *_options: Any
) -> tuple[Tensor, None]:
    """Return the norm of all tensors together, [1] on their device."""
    norms = torch._foreach_norm([tensor for tensors in lists for tensor in tensors])
    return torch.stack(norms).norm().float().view(1), None


def copy_parameters(optimizer: Any) -> None:
    """Copy the fp32 copies into the model's parameters."""
    if not _is_plain(optimizer):
        _THEIRS["parameters"](optimizer)
        return
    if pairs := _pairs_of(optimizer):  # a rank may train nothing
        torch._foreach_copy_([model for _, model, _ in pairs], [main for main, _, _ in pairs])


def copy_gradients(optimizer: Any) -> None:
    """Make the gradient buffers the gradients of the fp32 copies."""
    if not _is_plain(optimizer):
        _THEIRS["gradients"](optimizer)
        return
    for main, _, grad in _pairs_of(optimizer):
        main.grad = grad.float()


def counted_gradients(optimizer: Any) -> list[Tensor]:
    """Return the gradients that count for the norm, joined if adjacent; which ones count is computed once."""
    if not _is_plain(optimizer):
        found: list[Tensor] = _THEIRS["counted"](optimizer)
        return found
    parameters = optimizer.get_parameters()
    mask = getattr(optimizer, _COUNTED, None)
    if mask is None or len(mask) != len(parameters):
        mask = [_counts(parameter, optimizer) for parameter in parameters]
        setattr(optimizer, _COUNTED, mask)
    both = zip(parameters, mask, strict=True)
    grads = [parameter.grad for parameter, counts in both if counts and parameter.grad is not None]
    if any(grad.dtype != torch.float32 for _, _, grad in _pairs_of(optimizer)):
        return grads  # created in each step
    known, runs = getattr(optimizer, _RUNS, ([], []))
    if len(known) != len(grads) or not all(map(operator.is_, known, grads)):
        runs = joined(grads)
        setattr(optimizer, _RUNS, (grads, runs))
    return runs


def joined(tensors: list[Tensor]) -> list[Tensor]:
    """Join tensors that follow one another in a buffer into single flat tensors with the same numbers."""
    runs: list[list[Tensor]] = []
    place: tuple[int, int] | None = None  # expected start of the next tensor of a run
    for part in sorted(tensors, key=_place):
        if place is not None and _place(part) == place and part.is_contiguous():
            runs[-1].append(part)
        else:
            runs.append([part])
        storage, offset = _place(part)
        place = (storage, offset + part.numel()) if part.is_contiguous() else None
    sizes = [sum(part.numel() for part in run) for run in runs]
    return [
        run[0] if len(run) == 1 else run[0].as_strided((size,), (1,))
        for run, size in zip(runs, sizes, strict=True)
    ]


def _place(part: Tensor) -> tuple[int, int]:
    return part.untyped_storage()._cdata, int(part.storage_offset())


def zero_gradients(ddp: Any) -> None:
    """Zero gradients as Megatron does, and note that the sums need not be read before the first addition."""
    _THEIRS["zero"](ddp)
    for parameter in ddp.params_with_grad:
        setattr(parameter, _EMPTY, True)


def take_empty(parameters: Sequence[Any]) -> bool:
    """Return whether these parameters' gradient sums are still zero, and mark them as used."""
    empty = all(getattr(parameter, _EMPTY, False) for parameter in parameters)
    for parameter in parameters:
        setattr(parameter, _EMPTY, False)
    return empty


def backward_hook(ddp: Any, parameter: Any) -> Callable[..., None]:
    """Replace Megatron's gradient hook: a faster kernel adds the gradient to the parameter's sum."""
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    theirs: Callable[..., None] = _THEIRS["hook"](ddp, parameter)

    def hook(*unused: Any) -> None:
        empty = parameter.grad is not None and take_empty([parameter])
        # A matrix product may have added it already; Megatron's own code handles that case.
        added = parameter.grad is None or parameter.grad_added_to_main_grad
        known = parameter in ddp.param_to_bucket_group and not is_graph_capturing()
        if added or not known or getattr(parameter, "zero_out_wgrad", False):
            theirs(*unused)
            return
        add_gradient_(parameter.main_grad, parameter.grad, empty=empty)
        parameter.grad_added_to_main_grad = True
        theirs(*unused)
        parameter.grad_added_to_main_grad = False

    return hook


def _counts(parameter: Tensor, optimizer: Any) -> bool:
    """Return whether this rank counts the gradient: no other rank or use of the parameter does."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    group = getattr(optimizer, "tp_group", None)
    return bool(param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, group))


def _is_plain(optimizer: Any) -> bool:
    return not (
        optimizer.is_stub_optimizer
        or optimizer.ddp_config.use_megatron_fsdp
        or optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        or optimizer.config.fp8_recipe is not None
    )


def _pairs_of(optimizer: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return (fp32 copy, its part of the model's parameters, its part of the gradients); computed once."""
    pairs: list[tuple[Tensor, Tensor, Tensor]] | None = getattr(optimizer, _PAIRS, None)
    if pairs is not None:
        return pairs
    pairs = []
    kinds = (
        (optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups),
        (optimizer.shard_fp32_groups, optimizer.model_fp32_groups),
    )
    for mains, models in kinds:
        for main_group, model_group in zip(mains, models, strict=True):
            for main, model in zip(main_group, model_group, strict=True):
                ranges = optimizer._get_model_param_range_map(model)
                own, world = ranges["param"], ranges["gbuf_world_in_bucket"]
                assert own.size == world.size == main.nelement()
                buffer, _, bucket = optimizer.model_param_gbuf_map[model]
                flat = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
                grad = model.main_grad.view(-1)[own.start : own.end]
                pairs.append((main, flat[world.start : world.end].detach(), grad))
    setattr(optimizer, _PAIRS, pairs)
    return pairs
