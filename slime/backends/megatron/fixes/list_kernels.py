"""Lets megatron-core 0.16.1 handle all parameters in few kernels without TransformerEngine and Apex.

Its own stand-ins launch kernels for each parameter, and the one of the norm waits for the device each time:
a fifth of a step of a mixture of experts, which has thousands of parameters.
"""

from typing import Any

import torch
from torch import Tensor

_PAIRS = "_slime_pairs"  # attribute of an optimizer: what is copied where in each step
_COUNTED = "_slime_counted"  # attribute of an optimizer: for each parameter, whether its gradient counts


def install() -> None:
    """Puts these kernels in the place of missing ones, once per process; other packages' stay."""
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


_THEIRS: dict[str, Any] = {}


def norm_of_list(
    _chunk_size: int, _noop: Tensor, lists: list[list[Tensor]], *_options: Any
) -> tuple[Tensor, None]:
    """The norm of all tensors together, [1] on their device."""
    norms = torch._foreach_norm([tensor for tensors in lists for tensor in tensors])
    return torch.stack(norms).norm().float().view(1), None


def copy_parameters(optimizer: Any) -> None:
    """The fp32 copies into the model's parameters."""
    if not _is_plain(optimizer):
        _THEIRS["parameters"](optimizer)
        return
    if pairs := _pairs_of(optimizer):  # a rank may train nothing
        torch._foreach_copy_([model for _, model, _ in pairs], [main for main, _, _ in pairs])


def copy_gradients(optimizer: Any) -> None:
    """The gradient buffers become the gradients of the fp32 copies."""
    if not _is_plain(optimizer):
        _THEIRS["gradients"](optimizer)
        return
    for main, _, grad in _pairs_of(optimizer):
        main.grad = grad.float()


def counted_gradients(optimizer: Any) -> list[Tensor]:
    """The gradients that count for the norm: which of them do is asked once."""
    if not _is_plain(optimizer):
        found: list[Tensor] = _THEIRS["counted"](optimizer)
        return found
    parameters = optimizer.get_parameters()
    mask = getattr(optimizer, _COUNTED, None)
    if mask is None or len(mask) != len(parameters):
        mask = [_counts(parameter, optimizer) for parameter in parameters]
        setattr(optimizer, _COUNTED, mask)
    both = zip(parameters, mask, strict=True)
    return [parameter.grad for parameter, counts in both if counts and parameter.grad is not None]


def _counts(parameter: Tensor, optimizer: Any) -> bool:
    """Whether no other rank, and no other use of the parameter, counts its gradient too."""
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
    """(fp32 copy, its part of the model's parameters, its part of the gradients); found once."""
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
