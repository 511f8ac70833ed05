"""Turns a topology into launch plans: each engine's GPUs and flags, and the router in front of them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime.arguments.groups.topology import ServedModel, Topology
from slime.arguments.passthrough.program import yaml_words
from slime.engines.sglang.supervisor import BOOTSTRAP_PORT

Gpu = tuple[int, int]  # a machine, and the number of a device on it

_DISAGGREGATION = {
    "prefill": ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", BOOTSTRAP_PORT),
    "decode": ("--disaggregation-mode", "decode"),
    "regular": (),
}


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """One engine of a topology, or its part on one machine where it spans `num_nodes` of them.

    `gpu_ids`: its devices, counted within `machine`; empty on a CPU machine. `num_gpus`: those of all parts.
    `words`: flags of its server that come from its group (its share in disaggregation, then the overrides).
    """

    name: str
    model: str
    worker_type: str
    machine: int
    gpu_ids: tuple[int, ...]
    num_gpus: int
    words: tuple[str, ...] = ()
    node: int = 0
    num_nodes: int = 1


@dataclass(frozen=True, slots=True)
class EngineSite:
    """Settings of one engine of a run that are not in the arguments of the run.

    `quantization`: the quantization_config of pushed weights; None: as in the model's own config.
    """

    model_path: str
    update_weights: bool  # receives every push of the trainer's weights
    place: EnginePlace
    gpu_ids: tuple[int, ...]  # empty on a CPU machine
    host: str
    shm_prefix: str
    threads: int
    quantization: dict[str, Any] | None = None


def gpu_pool(num_machines: int, per_machine: int, first: int = 0) -> list[Gpu]:
    """Return every GPU of `n` equal machines, machine by machine, without the first ones."""
    return [divmod(gpu, per_machine) for gpu in range(first, num_machines * per_machine)]


def place_engines(topology: Topology, pool: Sequence[Gpu] = ()) -> tuple[EnginePlace, ...]:
    """Give GPUs of the pool to the groups in the order of the file; those of placeholders stay free.

    An engine over several machines has a place on each. An empty `pool`: no GPUs, and a place per engine.
    """
    places: list[EnginePlace] = []
    taken = 0
    for model in topology.models:
        for group in model.groups:
            size = group.num_gpus_per_engine
            for i in range(group.num_engines):
                start = taken + i * size
                number = sum(place.model == model.name and not place.node for place in places)
                name = f"engine-{number}" if model is topology.policy else f"{model.name}-engine-{number}"
                shares = _devices(name, pool[start : start + size], pool) if pool else {0: ()}
                kind = group.worker_type
                words = (*_DISAGGREGATION[kind], *override_words(group.overrides))
                places += [
                    EnginePlace(name, model.name, kind, machine, gpu_ids, size, words, node, len(shares))
                    for node, (machine, gpu_ids) in enumerate(shares.items())
                ]
            taken += group.num_gpus
    return tuple(places)


def _devices(name: str, gpus: Sequence[Gpu], pool: Sequence[Gpu]) -> dict[int, tuple[int, ...]]:
    """Return the GPUs of an engine by machine: all on one, or equally many on each of several."""
    per_machine = max(Counter(machine for machine, _ in pool).values())
    shares: dict[int, tuple[int, ...]] = {}
    for machine, gpu in gpus:
        shares[machine] = (*shares.get(machine, ()), gpu)
    if len(shares) > 1 and len(gpus) <= per_machine:
        (machine, first), (other, last) = gpus[0], gpus[-1]
        raise ValueError(
            f"{name} would get {len(gpus)} GPUs from GPU {first} of machine {machine} to GPU {last} of "
            f"machine {other}, which are on two machines: reorder the groups, or fill the gap with a "
            "placeholder group."
        )
    if len({len(share) for share in shares.values()}) > 1:
        counts = ", ".join(f"{len(share)} of machine {machine}" for machine, share in shares.items())
        raise ValueError(
            f"{name} would get {len(gpus)} GPUs: {counts}; an engine over several machines needs the same "
            f"number on each. Use a multiple of {per_machine} GPUs per engine, reorder the groups, or fill "
            "the gap with a placeholder group."
        )
    return shares


def override_words(overrides: dict[str, Any]) -> tuple[str, ...]:
    """`{"mem_fraction_static": 0.8, "enable_metrics": True}` as arguments of a server's command line."""
    words: list[str] = []
    for name, value in overrides.items():
        given = yaml_words(value)
        if given is not None:
            words += ["--" + name.replace("_", "-"), *given]
    return tuple(words)


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """The router in front of one model's engines; `words`: its flags that follow from the topology."""

    kind: str  # "sglang", "builtin", or "none": one engine, called directly
    words: tuple[str, ...] = ()


def plan_router(model: ServedModel, kind: str) -> RouterPlan:
    """Plan the router. `kind`: the run's choice; one engine needs none, disaggregation needs SGLang's."""
    if model.is_disaggregated:
        return RouterPlan("sglang", ("--pd-disaggregation",))
    return RouterPlan(kind if model.num_engines > 1 or kind == "sglang" else "none")


def render_plan(
    topology: Topology,
    places: tuple[EnginePlace, ...],
    router: str,
    command_of: Callable[[EnginePlace], list[str]],
) -> str:
    """Return the plan as text: a block per model, a line and a command per engine."""
    lines = [
        f"{topology.num_gpus} GPUs, {len({p.name for p in places})} engines, {len(topology.models)} models"
    ]
    for model in topology.models:
        plan = plan_router(model, router)
        weights = "every push" if model.update_weights else "as loaded, never changed"
        lines += ["", f"model {model.name}: {model.model_path}", f"  weights: {weights}"]
        lines += [f"  router: {' '.join([plan.kind, *plan.words])}"]
        for place in (place for place in places if place.model == model.name):
            where = (
                f"machine {place.machine} GPU {','.join(map(str, place.gpu_ids))}" if place.gpu_ids else "CPU"
            )
            lines += [
                f"  {place.name} ({place.worker_type}) on {where}",
                f"    {shlex.join(command_of(place))}",
            ]
        idle = sum(group.num_gpus for group in model.groups if group.worker_type == "placeholder")
        lines += [f"  placeholder: {idle} GPUs stay free"] if idle else []
    return "\n".join(lines)
