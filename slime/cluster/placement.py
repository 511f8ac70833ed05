"""Which devices each trainer rank and each engine gets: a pure function of the arguments."""

from __future__ import annotations

from dataclasses import dataclass

from slime.arguments import Args
from slime.utils.http_utils import get_rollout_num_engines


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
    num_engines = 0 if args.debug_train_only else get_rollout_num_engines(args)
    per_engine = args.rollout_num_gpus_per_engine
    if num_gpus == 0:
        return Placement(tuple(Slot(i) for i in range(num_ranks)), tuple(Slot(i) for i in range(num_engines)))
    offset = 0 if args.colocate else num_ranks
    needed = max(num_ranks, offset + num_engines * per_engine)
    if needed > num_gpus * args.actor_num_nodes:
        raise ValueError(
            f"{num_ranks} trainer ranks and {num_engines} engines of {per_engine} GPU need {needed} GPUs, "
            f"but {num_gpus} are visible: lower --actor-num-gpus-per-node or --rollout-num-gpus, or use --colocate"
        )
    ranks = tuple(Slot(i, (i,)) for i in range(num_ranks))
    first = [offset + i * per_engine for i in range(num_engines)]
    engines = tuple(Slot(i, tuple(range(start, start + per_engine))) for i, start in enumerate(first))
    return Placement(ranks, engines)
