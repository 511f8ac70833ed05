"""Joins the process groups in which trainer ranks broadcast weights, one per pipeline stage."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import TCPStore

from slime.engines.embedded.generate_json import BadRequest, text_of
from slime.engines.embedded.weight_update import BadWeights
from slime.utils.machine.accelerator import collectives
from slime.utils.machine.devices import COLLECTIVES
from slime.utils.machine.process_groups import LOOPBACK, BroadcastGroup, reaching, stay_on_loopback
from slime.wire.manifest import DTYPES
from slime.wire.protocol import shown

# The trainer's deadline is shorter, and it closes its connections when it expires.
_TIMEOUT = datetime.timedelta(minutes=10)
Bucket = list[tuple[str, torch.dtype, tuple[int, ...]]]  # name, dtype and shape of each tensor


class UpdateGroups:
    """The joined groups, by name. Methods block and must not be called on the engine's thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self._groups: dict[str, tuple[BroadcastGroup, torch.device]] = {}

    def join(self, body: Mapping[str, Any]) -> str:
        """Join the group that a body describes under SGLang's names; returns when all ranks have met."""
        name, address = text_of(body, "group_name"), text_of(body, "master_address")
        numbers: list[Any] = [body.get(key) for key in ("master_port", "rank_offset", "world_size")]
        port, rank, world_size = numbers  # this engine has one rank; rank 0 sends
        if not all(type(n) is int and 0 < n < 1 << 16 for n in numbers) or rank >= world_size:
            raise BadRequest(
                f"master_port, rank_offset and world_size are {shown(numbers)}: expected positive integers "
                "below 65536, rank_offset < world_size"
            )
        backend = body.get("backend")
        if backend not in COLLECTIVES:
            raise BadRequest(f"backend is {shown(backend)}: expected one of {COLLECTIVES}")
        if name in self._groups:
            raise BadRequest(f"{name} is already a group of this engine")
        if address == LOOPBACK:
            stay_on_loopback()
        try:
            store = TCPStore(address, port, world_size, False, _TIMEOUT, wait_for_workers=False)
            with reaching(address):
                group = BroadcastGroup(store, rank, world_size, backend, name, _TIMEOUT)
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadWeights(f"{name} at {address}:{port} cannot be joined: {error}") from error
        device = self._device if backend == collectives(self._device) else torch.device("cpu")
        self._groups[name] = (group, device)
        return f"rank {rank} of {name}"

    def leave(self, name: str) -> None:
        """Leave a group; a thread that receives from it gets an error."""
        group, _ = self._held(name)
        del self._groups[name]
        group.end()

    def _held(self, name: str) -> tuple[BroadcastGroup, torch.device]:
        if name not in self._groups:
            raise BadRequest(f"{shown(name)} is not a group of this engine, which has {sorted(self._groups)}")
        return self._groups[name]

    def receive(self, name: str, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Receive the tensors that rank 0 broadcasts, in the order of `bucket`."""
        group, device = self._held(name)
        try:
            tensors = {one: torch.empty(shape, dtype=dtype, device=device) for one, dtype, shape in bucket}
            group.broadcast(
                list(tensors.values()), _TIMEOUT.total_seconds(), lambda: name not in self._groups
            )
        except (RuntimeError, TypeError, OverflowError) as error:
            raise BadWeights(
                f"a bucket of {len(bucket)} tensors has no room, or the sender of {name} is gone or silent: "
                f"{error}"
            ) from error
        return tensors


def read_bucket(body: Mapping[str, Any]) -> Bucket:
    """Return the expected tensors, in order."""
    try:
        columns = (body["names"], body["dtypes"], body["shapes"])
        bucket = {str(name): (DTYPES[dtype], (*shape,)) for name, dtype, shape in zip(*columns, strict=True)}
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(
            f"names, dtypes and shapes must be lists of a name, one of {sorted(DTYPES)} and a list of "
            f"integers for each tensor: {shown(repr(error))}"
        ) from error
    return [(name, *about) for name, about in bucket.items()]
