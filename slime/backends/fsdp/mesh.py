"""The process groups of a rank, numbered tensor-parallel first, then context-, then data-parallel."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime.arguments import Args
from slime.backends.base import Layout


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups of one rank. Parameters are sharded over data- and context-parallel ranks together.

    With --fsdp-shard-size N, every N consecutive ranks of them hold a replica of the parameters (HSDP).
    """

    layout: Layout
    shard: DeviceMesh  # one-dimensional, or (replica, shard)
    token_group: dist.ProcessGroup  # data- and context-parallel ranks: they have different tokens
    tensor: DeviceMesh | None  # None: no tensor parallelism
    data_group: dist.ProcessGroup
    context_group: dist.ProcessGroup | None  # None: no context parallelism

    @property
    def num_replicas(self) -> int:
        """The number of groups of ranks that hold all parameters between them."""
        return self.shard.size(0) if self.shard.ndim > 1 else 1

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
        size = args.fsdp_shard_size or dp * cp
        assert dp * cp % size == 0, f"{dp * cp} ranks in shard groups of {size}"
        if tp == cp == 1 and size == dp:
            mesh = init_device_mesh(device_type, (dp,), mesh_dim_names=("data",))
            return cls(layout, mesh, mesh.get_group("data"), None, mesh.get_group("data"), None)
        ranks = init_device_mesh(device_type, (dp, cp, tp), mesh_dim_names=("data", "context", "tensor"))
        whole = init_device_mesh(device_type, (dp * cp, tp), mesh_dim_names=("shard", "tensor"))
        tokens, shard = whole.get_group("shard"), whole["shard"]
        if size < dp * cp:
            sizes, names = (dp * cp // size, size, tp), ("replica", "shard", "tensor")
            whole = init_device_mesh(device_type, sizes, mesh_dim_names=names)
            shard = whole["replica", "shard"]
        return cls(
            layout,
            shard,
            tokens,
            whole["tensor"] if tp > 1 else None,
            ranks.get_group("data"),
            ranks.get_group("context") if cp > 1 else None,
        )
