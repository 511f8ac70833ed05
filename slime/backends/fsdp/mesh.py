"""The process groups of a rank, numbered tensor-parallel first, then context-, then data-parallel."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime.arguments import Args
from slime.backends.base import Layout


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups of one rank. Parameters are sharded over data- and context-parallel ranks together."""

    layout: Layout
    shard: DeviceMesh  # one-dimensional
    tensor: DeviceMesh | None  # None: no tensor parallelism
    data_group: dist.ProcessGroup
    context_group: dist.ProcessGroup | None  # None: no context parallelism

    @classmethod
    def build(cls, args: Args, rank: int, world_size: int, device_type: str) -> "Mesh":
        """Build the groups. Example: 8 ranks, tensor 2, context 2: rank 5 = data 1, context 0, tensor 1."""
        tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
        dp = world_size // (tp * cp)
        layout = Layout(
            dp_size=dp,
            dp_rank=rank // (cp * tp),
            cp_size=cp,
            cp_rank=rank // tp % cp,
            tp_size=tp,
            tp_rank=rank % tp,
        )
        if tp == cp == 1:
            mesh = init_device_mesh(device_type, (dp,), mesh_dim_names=("data",))
            return cls(layout, mesh, None, mesh.get_group("data"), None)
        replicas = init_device_mesh(device_type, (dp, cp, tp), mesh_dim_names=("data", "context", "tensor"))
        whole = init_device_mesh(device_type, (dp * cp, tp), mesh_dim_names=("shard", "tensor"))
        return cls(
            layout,
            whole["shard"],
            whole["tensor"] if tp > 1 else None,
            replicas.get_group("data"),
            replicas.get_group("context") if cp > 1 else None,
        )
