"""From a topology to a launch plan: which engine on which GPUs with which command line, behind which router. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.arguments.sglang import yaml_words
from slime.arguments.topology import ServedModel, ServerGroup, Topology
from slime.engines.sglang.supervisor import BOOTSTRAP_PORT

_DISAGGREGATION = {
    "prefill": ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", BOOTSTRAP_PORT),
    "decode": ("--disaggregation-mode", "decode"),
    "regular": (),
}


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """One engine of a topology. `gpu_ids`: its devices, counted within `machine`; empty on a CPU machine.

    `words`: flags of its server that come from its group (its share in disaggregation, then the overrides).
    """

    name: str
    model: str
    worker_type: str
    machine: int
    gpu_ids: tuple[int, ...]
    num_gpus: int
    words: tuple[str, ...] = ()


def place_engines(topology: Topology, *, first_gpu: int = 0, gpus_per_machine: int = 0) -> tuple[EnginePlace, ...]:
    """Groups take GPUs in the order of the file, from `first_gpu` on; placeholders keep theirs free.

    `gpus_per_machine` 0: a CPU machine, where engines name no device.
    """
    places: list[EnginePlace] = []
    gpu = first_gpu
    for model in topology.models:
        for group in model.groups:
            for i in range(group.num_engines):
                start = gpu + i * group.num_gpus_per_engine
                name = _engine_name(topology, model, sum(place.model == model.name for place in places))
                machine, gpu_ids = _devices(name, start, group.num_gpus_per_engine, gpus_per_machine)
                size = group.num_gpus_per_engine
                places.append(
                    EnginePlace(name, model.name, group.worker_type, machine, gpu_ids, size, _group_words(group))
                )
            gpu += group.num_gpus
    return tuple(places)


def _engine_name(topology: Topology, model: ServedModel, number: int) -> str:
    return f"engine-{number}" if model is topology.policy else f"{model.name}-engine-{number}"


def _devices(name: str, start: int, size: int, per_machine: int) -> tuple[int, tuple[int, ...]]:
    if per_machine == 0:
        return 0, ()
    if size > per_machine:
        raise ValueError(
            f"{name} needs {size} GPUs and a machine has {per_machine}: an engine over several machines is not built; "
            f"use at most {per_machine} GPUs per engine."
        )
    machine, first = divmod(start, per_machine)
    if first + size > per_machine:
        raise ValueError(
            f"{name} would get GPUs {start} to {start + size - 1}, which lie on two machines of {per_machine}: reorder the "
            "groups, or fill the gap with a placeholder group."
        )
    return machine, tuple(range(first, first + size))


def _group_words(group: ServerGroup) -> tuple[str, ...]:
    return (*_DISAGGREGATION[group.worker_type], *override_words(group.overrides))


def override_words(overrides: dict[str, Any]) -> tuple[str, ...]:
    """`{"mem_fraction_static": 0.8, "enable_metrics": True}` as words of a server's command line."""
    words: list[str] = []
    for name, value in overrides.items():
        given = yaml_words(value)
        if given is not None:
            words += ["--" + name.replace("_", "-"), *given]
    return tuple(words)


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """What stands before the engines of one model; `words`: its own flags that follow from the topology."""

    model: str
    kind: str  # "sglang", "builtin", or "none": one engine, asked directly
    words: tuple[str, ...] = ()


def plan_router(model: ServedModel, kind: str) -> RouterPlan:
    """`kind`: what the run asks for; one engine alone needs none, and disaggregation needs SGLang's."""
    if model.is_disaggregated:
        return RouterPlan(model.name, "sglang", ("--pd-disaggregation",))
    return RouterPlan(model.name, kind if model.num_engines > 1 or kind == "sglang" else "none")


def render_plan(
    topology: Topology, places: tuple[EnginePlace, ...], router: str, command_of: Callable[[EnginePlace], list[str]]
) -> str:
    """The plan as people read it: a block per model, a line and a command per engine."""
    lines = [f"{topology.num_gpus} GPUs, {len(places)} engines, {len(topology.models)} models"]
    for model in topology.models:
        plan = plan_router(model, router)
        weights = "every push" if model.update_weights else "as loaded, never changed"
        lines += ["", f"model {model.name}: {model.model_path}", f"  weights: {weights}"]
        lines += [f"  router: {' '.join([plan.kind, *plan.words])}"]
        for place in (place for place in places if place.model == model.name):
            where = f"machine {place.machine} GPU {','.join(map(str, place.gpu_ids))}" if place.gpu_ids else "CPU"
            lines += [f"  {place.name} ({place.worker_type}) on {where}", f"    {shlex.join(command_of(place))}"]
        idle = sum(group.num_gpus for group in model.groups if group.worker_type == "placeholder")
        lines += [f"  placeholder: {idle} GPUs stay free"] if idle else []
    return "\n".join(lines)
