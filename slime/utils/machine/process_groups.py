"""Opens the rendezvous stores of process groups, and joins groups with ranks in other programs."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from slime.utils.machine.ports import (
    GLOO_INTERFACE,
    family_of,
    interface_environment,
    interface_towards,
    is_loopback,
)

LOOPBACK = "127.0.0.1"


def open_store(host: str, world_size: int, timeout: datetime.timedelta | None = None) -> TCPStore:
    """Open the rendezvous store of a group in this process, on a free port: `store.port`.

    It listens at the address `host` alone: by default torch listens on every interface, and the store has no
    access control.
    """
    listener = socket.create_server((host, 0), family=family_of(host))
    options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.fileno()}
    options |= {} if timeout is None else {"timeout": timeout}
    store = TCPStore(host, listener.getsockname()[1], world_size, True, **options)
    listener.detach()  # the store closes it
    return store


def network_environment(host: str) -> dict[str, str]:
    """Return the environment with which ranks at a loopback address use loopback for their groups."""
    return {GLOO_INTERFACE: "lo"} if host == LOOPBACK and os.path.isdir("/sys/class/net/lo") else {}


def prefer_interface_of(address: str) -> None:
    """Create groups over the interface that has this host's `address`, unless the user has set one."""
    for name, value in interface_environment(address).items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def reaching(host: str) -> Iterator[None]:
    """Create groups in this block over the interface that leads to `host`, in a process that otherwise uses
    loopback.

    Gloo by itself takes the address of the machine's name, which may be loopback or unknown.
    """
    before = os.environ.get(GLOO_INTERFACE)
    interface = interface_towards(host) if before in (None, "lo") and not is_loopback(host) else None
    if interface is None:
        yield
        return
    os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        os.environ.pop(GLOO_INTERFACE)
        if before is not None:
            os.environ[GLOO_INTERFACE] = before


def stay_on_loopback() -> None:
    """Keep the groups of this process on loopback, unless the user has set an interface."""
    for name, value in network_environment(LOOPBACK).items():
        os.environ.setdefault(name, value)


def limit_every_group(timeout: datetime.timedelta) -> None:
    """Set the timeout of collectives in all groups, including those split off the default one.

    Torch gives those half an hour, whatever the default group was created with.
    """
    # Private parts of torch, checked on 2.11 and 2.13; imported here so that nothing else depends on them.
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    for group in list(_world.pg_map):
        with contextlib.suppress(ValueError):  # this rank is not in it
            _set_pg_timeout(timeout, group)


def additional_group(
    store: Store, rank: int, world_size: int, backend: str, name: str, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Join the group `name` as `rank`; return when all `world_size` ranks have met at the store.

    `new_group` only splits the default group, so this uses the function below it, as SGLang does on its side;
    names and prefixes must match SGLang's.
    """
    # Private parts of torch, checked on 2.11 and 2.13; imported here so that nothing else depends on them.
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

    store.set_timeout(timeout)
    group: dist.ProcessGroup
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type] # a NewType of str, which not every release has
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group
