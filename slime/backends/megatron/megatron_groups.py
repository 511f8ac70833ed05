"""Megatron's process groups and this rank's place in them."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from slime.arguments import Args
from slime.backends.base import Layout
from slime.catalog.deadlines import timeout_s

# Flags with these names are Megatron's own.
PARALLEL_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)


def init_groups(args: Args, device: torch.device) -> None:
    """Create the process groups (again, if a model of another layout was built before in this process)."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        **{name: getattr(args, name) for name in PARALLEL_SIZES},
        distributed_timeout_minutes=timeout_s(args, "collective") / 60,
        create_gloo_process_groups=device.type != "cpu",
    )
    model_parallel_cuda_manual_seed(args.seed)


def current_layout() -> Layout:
    """Return this rank's place in the process groups."""
    return Layout(
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
    )


def from_last_stage(value: Any) -> Any:
    """Broadcast a picklable value that only the last pipeline stage knows to all stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_process_group_ranks(group)[-1], group=group)
    return values[0]
