"""The engine's end of the process groups in which trainer ranks broadcast weights, one per pipeline stage."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from slime.engines.embedded.generate_json import BadRequest
from slime.engines.embedded.weight_update import BadWeights
from slime.utils.machine.process_groups import (
    LOOPBACK,
    group_beside_the_default,
    reaching,
    stay_on_loopback,
)
from slime.wire.manifest import DTYPES
from slime.wire.protocol import shown

# The trainer's own deadline is shorter, and it closes its connections when that has passed.
_TIMEOUT = datetime.timedelta(minutes=10)
_BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where the group meets, and which of its ranks this engine is (it has one; rank 0 sends)."""

    name: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> GroupPlace:
        """Reads the fields under SGLang's names."""
        name, address = texts = [body.get(key) for key in ("group_name", "master_address")]
        numbers: list[Any] = [body.get(key) for key in ("master_port", "rank_offset", "world_size")]
        if not all(isinstance(text, str) and text for text in texts):
            raise BadRequest("group_name and master_address must be strings")
        port, rank, world_size = numbers
        if not all(type(n) is int and 0 < n < 1 << 16 for n in numbers) or rank >= world_size:
            raise BadRequest(
                "master_port, rank_offset and world_size must be integers below 65536, 0 < rank_offset < "
                "world_size"
            )
        if body.get("backend") not in _BACKENDS:
            raise BadRequest(f"backend is {shown(body.get('backend'))}: expected one of {_BACKENDS}")
        return cls(str(name), str(address), port, rank, world_size, body["backend"])


class UpdateGroups:
    """The groups that stand, by name. Methods block; they are called beside the engine's thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self._groups: dict[str, tuple[dist.ProcessGroup, torch.device]] = {}

    def join(self, place: GroupPlace) -> None:
        """Returns when all ranks have met."""
        if place.name in self._groups:
            raise BadRequest(f"{place.name} is a group of this engine already")
        if place.address == LOOPBACK:
            stay_on_loopback()
        try:
            store = TCPStore(
                place.address, place.port, place.world_size, False, _TIMEOUT, wait_for_workers=False
            )
            with reaching(place.address):
                group = group_beside_the_default(
                    store, place.rank, place.world_size, place.backend, place.name, _TIMEOUT
                )
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadWeights(
                f"{place.name} at {place.address}:{place.port} cannot be joined: {error}"
            ) from error
        device = self._device if place.backend == "nccl" else torch.device("cpu")
        self._groups[place.name] = (group, device)

    def leave(self, name: Any) -> bool:
        """False: there is no such group."""
        held = self._groups.pop(name, None) if isinstance(name, str) else None
        if held is not None:
            dist.destroy_process_group(held[0])
        return held is not None

    def receive(
        self, name: Any, bucket: list[tuple[str, torch.dtype, tuple[int, ...]]]
    ) -> dict[str, torch.Tensor]:
        """The tensors that rank 0 broadcasts, in the order of `bucket`: (name, dtype, shape) of each."""
        if not isinstance(name, str) or name not in self._groups:
            raise BadRequest(f"{shown(name)} is not a group of this engine, which has {sorted(self._groups)}")
        group, device = self._groups[name]
        try:
            tensors = {
                tensor: torch.empty(shape, dtype=dtype, device=device) for tensor, dtype, shape in bucket
            }
        except (RuntimeError, TypeError, OverflowError) as error:
            raise BadWeights(f"there is no room for a bucket of {len(bucket)} tensors: {error}") from error
        try:
            handles = [
                dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors.values()
            ]
            for handle in handles:
                handle.wait()
        except RuntimeError as error:
            raise BadWeights(f"the sender of {name} is gone or silent: {error}") from error
        return tensors


def read_bucket(body: Mapping[str, Any]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(name, dtype, shape) of each tensor that is to come."""
    parts: list[Any] = [body.get(key) for key in ("names", "dtypes", "shapes")]
    names, dtypes, shapes = parts
    if not all(isinstance(part, list) for part in parts):
        raise BadRequest("names, dtypes and shapes must be lists")
    if not all(isinstance(word, str) for word in (*names, *dtypes)):
        raise BadRequest("names and dtypes must be lists of strings")
    if not len(set(names)) == len(names) == len(dtypes) == len(shapes):
        raise BadRequest("names must differ, and have a dtype and a shape each")
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown:
        raise BadRequest(f"dtype {shown(unknown[0])}: expected one of {sorted(DTYPES)}")
    if not all(isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) for shape in shapes):
        raise BadRequest("a shape must be a list of integers, none below zero")
    return [
        (name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
