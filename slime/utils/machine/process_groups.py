"""Opens the rendezvous stores of process groups, and joins groups with ranks in other programs."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from slime.utils.async_utils import in_background
from slime.utils.machine.accelerator import gpu
from slime.utils.machine.devices import DEVICES
from slime.utils.machine.ports import (
    GLOO_INTERFACE,
    family_of,
    interface_environment,
    interface_towards,
    is_loopback,
)

LOOPBACK = "127.0.0.1"

_POLL_S = 0.001
_END_S = 3.0  # longest wait for the end of a group; a member that hangs can keep it longer
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


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
    movable = os.environ.get(GLOO_INTERFACE) in (None, "lo") and not is_loopback(host)
    interface = interface_towards(host) if movable else None
    with contextlib.nullcontext() if interface is None else _variable(GLOO_INTERFACE, interface):
        yield


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable of this process within the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


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


class BroadcastGroup:
    """A process group in which rank 0 broadcasts tensors to ranks of other programs, by NCCL or gloo.

    A member may hang or die at any time. This rank then gets a RuntimeError and ends the group; the process
    and its other groups are not affected.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, backend: str, name: str, timeout: datetime.timedelta
    ):
        """Join the group as `rank`; return when all `world_size` ranks have met at the store.

        `new_group` only splits the default group, so this uses the function below it, as SGLang does on its
        side; names and prefixes must match SGLang's.
        """
        # Private parts of torch, checked on 2.11 and 2.13; here so that nothing else depends on them.
        from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

        store.set_timeout(timeout)
        self._group: dist.ProcessGroup
        # Torch reads the variable for each NCCL group that it creates. This group then has no watchdog that
        # ends the process after an error, and `wait` raises the error, as with gloo.
        with _variable(_BLOCKING_WAIT, "1"):
            self._group, _ = _new_process_group_helper(
                world_size,
                rank,
                [],
                Backend(backend),
                PrefixStore(name, store),
                group_name=name,  # type: ignore[arg-type] # a NewType of str, which not every release has
                timeout=timeout,
            )
        _world.pg_group_ranks[self._group] = {member: member for member in range(world_size)}

    def broadcast(
        self, tensors: Sequence[torch.Tensor], deadline_s: float, is_over: Callable[[], bool]
    ) -> None:
        """Send the tensors as rank 0, or receive into them; return when all are complete.

        RuntimeError: a member is gone, `deadline_s` has passed, or `is_over()`. The group must end then.
        """
        stream = gpu.current_stream(tensors[0].device) if tensors[0].is_cuda else None
        ends = time.monotonic() + deadline_s

        def issue() -> list[Any]:
            # No other frame holds the group, which an error's traceback would keep: see `end`.
            group = self._group
            with gpu.stream(stream):  # None: no stream is set
                return [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]

        def wait_until(is_done: Callable[[], bool]) -> None:
            while not is_done():
                if is_over():
                    raise RuntimeError("another member of the group has failed or has left it")
                if time.monotonic() > ends:
                    raise RuntimeError(f"Timed out waiting {deadline_s:.0f} s for a broadcast")
                time.sleep(_POLL_S)

        # In a thread, because NCCL connects the ranks in the first call, which cannot be interrupted.
        issued = in_background(issue, "broadcast")
        wait_until(issued.done)
        for handle in issued.result():
            wait_until(handle.is_completed)
            handle.wait()  # it returns at once, and raises the error of a broadcast that failed

    def end(self) -> None:
        """Leave the group, and abort what still runs in it: its other members may be gone or may hang."""
        # The thread has the last reference, so that the destructor, which may wait for a member, runs there.
        ending = threading.Thread(
            target=_end, args=(self.__dict__.pop("_group"),), name="end of a group", daemon=True
        )
        ending.start()
        ending.join(_END_S)


def _end(group: dist.ProcessGroup) -> None:
    from torch.distributed.distributed_c10d import _abort_process_group  # private too

    # Of gloo, destroying a group closes its connections; of NCCL, it would wait for what runs.
    (
        _abort_process_group
        if dist.get_backend(group) != DEVICES["cpu"].collectives
        else dist.destroy_process_group
    )(group)
