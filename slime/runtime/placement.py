"""Decides which devices of which machine each trainer rank and each engine gets, from the arguments alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.arguments import Args
from slime.catalog.engines import ENGINES
from slime.engines.launch_plan import Gpu, gpu_pool, place_engines
from slime.utils.machine.cores import num_cores
from slime.utils.machine.run_identity import LOOPBACK
from slime.utils.machine.shared_gpu import device_environment


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one process. `gpu_ids`: device numbers on its machine; empty on a CPU machine.

    `index`: of the trainer rank or the engine; an engine over several machines has a slot on each.
    `machine`: counted within the plan. `host`: its address, as the other machines of the plan reach it.
    `cores`: what a process may use there; 0: as much as here.
    """

    index: int = 0
    gpu_ids: tuple[int, ...] = ()
    machine: int = 0
    host: str = LOOPBACK
    cores: int = 0

    @property
    def env(self) -> dict[str, str]:
        return device_environment(self.gpu_ids)

    @property
    def gpus(self) -> list[Gpu]:
        return [(self.machine, gpu) for gpu in self.gpu_ids]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the run: its address, our devices in the order of the plan, and cores as in a slot."""

    host: str
    gpu_ids: tuple[int, ...] = ()
    cores: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """One slot per trainer rank and per engine; where they are colocated, they name the same devices.

    `spreads`: objects that go `anywhere` may also use hosts without GPUs, where the plan has no slot.
    """

    trainer: tuple[Slot, ...]
    engines: tuple[Slot, ...]
    spreads: bool = False

    @property
    def gpus_of_machines(self) -> tuple[int, ...]:
        """The number of devices, counted from the first, that the plan needs of each machine."""
        slots = (*self.trainer, *self.engines)
        needs = [0] * (1 + max((slot.machine for slot in slots), default=0))
        for machine, gpu in (gpu for slot in slots for gpu in slot.gpus):
            needs[machine] = max(needs[machine], gpu + 1)
        return tuple(needs)

    @property
    def host(self) -> str:
        """The host of the trainer's first rank."""
        return self.trainer[0].host if self.trainer else LOOPBACK

    def on(self, machines: Sequence[Machine]) -> Placement:
        """Return the plan with the addresses and device numbers of real machines."""

        def settle(slot: Slot) -> Slot:
            machine = machines[slot.machine]
            devices = tuple(machine.gpu_ids[gpu] for gpu in slot.gpu_ids)
            return replace(slot, host=machine.host, gpu_ids=devices, cores=machine.cores)

        return Placement(tuple(map(settle, self.trainer)), tuple(map(settle, self.engines)))


def by_engine(slots: Sequence[Slot]) -> list[tuple[Slot, ...]]:
    """Return the slots of each engine."""
    return [tuple(found) for _, found in itertools.groupby(slots, key=lambda slot: slot.index)]


def cores_each(slots: Sequence[Slot]) -> int:
    """Return the cores per slot on the most crowded machine."""
    crowd = max(Counter(slot.machine for slot in slots).values(), default=1)
    return max(1, min((slot.cores or num_cores() for slot in slots), default=1) // crowd)


def plan_placement(args: Args, num_gpus: int, num_machines: int = 1) -> Placement:
    """Give trainer ranks the first devices of their machines; engines follow, or share them when colocated.

    `num_gpus`: devices per machine. On CPU machines (0) a "gpu" of the arguments is a rank, and slots name no
    device. `num_machines`: the most that may be used.
    """
    if args.actor_num_nodes > num_machines and not args.debug_rollout_only:
        raise ValueError(
            f"--actor-num-nodes is {args.actor_num_nodes}, but there are {num_machines} machines; use at "
            "most that."
        )
    per_node = args.actor_num_gpus_per_node
    training = [divmod(rank, per_node) for rank in range(_num_ranks(args))]
    trainer = tuple(Slot(i, (gpu,) if num_gpus else (), machine) for i, (machine, gpu) in enumerate(training))
    num_engines, wanted = _num_engines(args), 0 if _none_of_ours(args) else args.engine_topology.num_gpus
    pool = _engine_gpus(args, training, wanted, (num_machines, num_gpus)) if num_gpus else []
    if _none_of_ours(args):
        return Placement(trainer, tuple(Slot(i) for i in range(num_engines)))
    if not pool and args.engine_topology.largest_engine > args.num_gpus_per_node:
        pool = _engine_gpus(args, [], wanted, (num_machines, args.num_gpus_per_node))
    if not pool:
        return Placement(trainer, _spread(num_engines, min(args.actor_num_nodes, num_machines)))
    places = place_engines(args.engine_topology, pool)
    if any(place.node for place in places) and not ENGINES[args.rollout_engine].spans_machines:
        raise ValueError(
            f"an engine would get GPUs of several machines, but --rollout-engine {args.rollout_engine} runs "
            "on one; use a smaller --rollout-num-gpus-per-engine, or --rollout-engine sglang."
        )
    names = list(dict.fromkeys(place.name for place in places))
    return Placement(
        trainer, tuple(Slot(names.index(p.name), p.gpu_ids if num_gpus else (), p.machine) for p in places)
    )


def num_machines_needed(args: Args, num_gpus: int) -> int:
    """Return the least number of machines with `num_gpus` devices each on which the run has room."""
    num_ranks, wanted = _num_ranks(args), 0 if _none_of_ours(args) else args.engine_topology.num_gpus
    devices = max(num_ranks, wanted) if args.colocate else num_ranks + wanted
    nodes = 0 if args.debug_rollout_only else args.actor_num_nodes
    # Without GPUs an engine may span machines, too.
    return max(
        *(1, nodes),
        -(-devices // num_gpus)
        if num_gpus
        else -(-(wanted and args.engine_topology.largest_engine) // args.num_gpus_per_node),
    )


def host_rows(args: Args, placed: Placement, hosts: int) -> list[dict[str, Any]]:
    """Return what lies on each host: trainer ranks and engines, and the GPUs of each."""
    names = list(dict.fromkeys(place.name for place in place_engines(args.engine_topology)))
    rows: list[dict[str, Any]] = [{"host": f"host-{i}", "ranks": {}, "engines": {}} for i in range(hosts)]
    for slot in placed.trainer:
        rows[slot.machine]["ranks"][slot.index] = slot.gpu_ids
    for slot in () if args.rollout_external_engine_addrs else placed.engines:
        rows[slot.machine]["engines"][names[slot.index]] = slot.gpu_ids
    return rows


def host_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows as text, one line for a host."""

    def spans(numbers: Sequence[int]) -> str:
        first, last = min(numbers), max(numbers)
        whole = len(numbers) == last - first + 1
        return (f"{first}-{last}" if last > first else f"{first}") if whole else ",".join(map(str, numbers))

    lines = []
    for row in rows:
        parts = []
        if row["ranks"]:
            gpus = [gpu for ids in row["ranks"].values() for gpu in ids]
            parts.append(f"ranks {spans([*row['ranks']])}" + (f" on GPU {spans(gpus)}" if gpus else ""))
        parts += [f"{n} on GPU {spans(ids)}" if ids else n for n, ids in row["engines"].items()]
        lines.append(f"{row['host']}: {'; '.join(parts) or 'nothing'}")
    return lines


def _num_ranks(args: Args) -> int:
    return 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node


def _none_of_ours(args: Args) -> bool:
    """Return whether no engine takes a device: there is none, or somebody else runs them."""
    return args.debug_train_only or bool(args.rollout_external_engine_addrs)


def _num_engines(args: Args) -> int:
    if args.debug_train_only:
        return 0
    if args.rollout_external_engine_addrs:
        return len(args.rollout_external_engine_addrs)
    return sum(model.num_engines for model in args.engine_topology.models)


def _spread(num_engines: int, num_machines: int) -> tuple[Slot, ...]:
    """Spread engines evenly over CPU machines, neighbours together."""
    return tuple(Slot(i, machine=i * num_machines // num_engines) for i in range(num_engines))


def _engine_gpus(args: Args, training: list[Gpu], wanted: int, machines: tuple[int, int]) -> list[Gpu]:
    """Return GPUs for engines in the order of use. `machines`: their number, and the GPUs of each."""
    num_machines, per_machine = machines
    needed = max(len(training), wanted if args.colocate else len(training) + wanted)
    total = num_machines * per_machine
    if needed > total or (training and args.actor_num_gpus_per_node > per_machine):
        several = f"{num_machines} machines have {per_machine} each"
        there = f"{total} are visible" if num_machines == 1 else several
        raise ValueError(
            f"{len(training)} trainer ranks and {_num_engines(args)} engines on {wanted} GPUs need {needed} "
            f"GPUs, but {there}: lower --actor-num-gpus-per-node or --rollout-num-gpus, or use --colocate"
        )
    others = [gpu for gpu in gpu_pool(num_machines, per_machine) if gpu not in training]
    return [*training, *others] if args.colocate else others
