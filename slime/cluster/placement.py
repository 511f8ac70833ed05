"""Which devices each trainer rank and each engine gets: a pure function of the arguments."""

from __future__ import annotations

from dataclasses import dataclass

from slime.arguments import Args
from slime.engines.topology import place_engines


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one process. `gpu_ids`: device numbers on its machine; empty on a CPU machine."""

    index: int = 0
    gpu_ids: tuple[int, ...] = ()

    @property
    def env(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpu_ids))} if self.gpu_ids else {}


@dataclass(frozen=True, slots=True)
class Placement:
    """One slot per trainer rank and per engine; colocated stages name the same devices."""

    trainer: tuple[Slot, ...]
    engines: tuple[Slot, ...]


def plan_placement(args: Args, num_gpus: int) -> Placement:
    """Trainer ranks take the first devices; engines follow, or share them when colocated.

    On a CPU machine (`num_gpus` 0) a "gpu" of the arguments is a rank, and slots name no device.
    """
    num_ranks = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    if num_gpus == 0 or args.rollout_external_engine_addrs:
        engines = tuple(Slot(i) for i in range(_num_engines(args)))
        if num_gpus == 0:
            return Placement(tuple(Slot(i) for i in range(num_ranks)), engines)
    else:
        engines = _engine_slots(args, num_ranks, num_gpus)
    return Placement(tuple(Slot(i, (i,)) for i in range(num_ranks)), engines)


def _num_engines(args: Args) -> int:
    if args.debug_train_only:
        return 0
    if args.rollout_external_engine_addrs:
        return len(args.rollout_external_engine_addrs)
    return sum(model.num_engines for model in args.engine_topology.models)


def _engine_slots(args: Args, num_ranks: int, num_gpus: int) -> tuple[Slot, ...]:
    """In the order of the topology."""
    offset = 0 if args.colocate else num_ranks
    total, wanted = num_gpus * args.actor_num_nodes, 0 if args.debug_train_only else args.engine_topology.num_gpus
    needed = max(num_ranks, offset + wanted)
    if needed > total:
        raise ValueError(
            f"{num_ranks} trainer ranks and {_num_engines(args)} engines on {wanted} GPUs need {needed} GPUs, "
            f"but {num_gpus} are visible: lower --actor-num-gpus-per-node or --rollout-num-gpus, or use --colocate"
        )
    if args.debug_train_only:
        return ()
    places = place_engines(args.engine_topology, first_gpu=offset, gpus_per_machine=total)
    return tuple(Slot(i, place.gpu_ids) for i, place in enumerate(places))
