"""Weights by broadcast in a process group of the trainer's first rank and all ranks of all engines: NCCL, or gloo on CPU."""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import logging
import secrets
from collections.abc import Coroutine

import torch
import torch.distributed as dist

from slime.utils.async_utils import run
from slime.weight_sync.base import LiveReport, LiveTransport, NamedTensors, SenderOptions, Target
from slime.wire.control import EngineControl
from slime.wire.manifest import DTYPE_NAMES

logger = logging.getLogger(__name__)


class DistributedSender:
    """Holds the group over pushes; a new one is made when an engine has joined or left."""

    def __init__(self, options: SenderOptions):
        self._options = options
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="weight-send")
        self._targets: tuple[Target, ...] = ()
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""

    def open(self, version: str, targets: tuple[Target, ...]) -> None:
        self._version, self._num_tensors, self._nbytes = version, 0, 0
        self._failure: str | None = None
        if targets != self._targets:
            self._leave()
            self._targets = targets

    def send(self, bucket: NamedTensors) -> None:
        self._num_tensors += len(bucket)
        self._nbytes += sum(tensor.nbytes for _, tensor in bucket)
        if self._failure is not None or not self._targets:
            return
        try:
            if self._group is None:
                self._join(bucket[0][1].device)
            self._broadcast(bucket)
        except Exception as error:
            # One broken member breaks the group for all: they take the copy on disk, and the group is made anew.
            self._failure = f"{type(error).__name__}: {error}"
            logger.warning("broadcast of weights %s failed: %s", self._version, self._failure)
            self._leave()

    def _broadcast(self, bucket: NamedTensors) -> None:
        described = [(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in bucket]
        told = self._on_all(
            [c.update_from_group(described, self._group_name, self._version) for c in self._controls()]
        )
        handles = [dist.broadcast(t.contiguous(), src=0, group=self._group, async_op=True) for _, t in bucket]
        for handle in handles:
            handle.wait()
        told.result()

    def _join(self, device: torch.device) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=self._options.deadline_s)
        self._group_name = f"slime-weights-{secrets.token_hex(4)}"
        world_size = 1 + sum(target.num_ranks for target in self._targets)
        # Port 0: the store binds a free one and says which, so that nobody can take it in between.
        store = dist.TCPStore(self._options.host, 0, world_size, True, timeout, wait_for_workers=False)
        calls, offset = [], 1
        for target, control in zip(self._targets, self._controls(), strict=True):
            join = control.join_group(self._options.host, store.port, offset, world_size, self._group_name, backend)
            calls.append(join)
            offset += target.num_ranks
        joined = self._on_all(calls)
        self._group = _group_beside_the_default(store, world_size, backend, self._group_name, timeout)
        joined.result()

    def _leave(self) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        try:
            self._on_all([c.leave_group(self._group_name) for c in self._controls()]).result()
        except Exception as error:  # an engine that is gone has left
            logger.info("leaving %s: %s", self._group_name, error)
        dist.destroy_process_group(group)

    def _controls(self) -> list[EngineControl]:
        return [EngineControl(target.url, self._options.deadline_s) for target in self._targets]

    def _on_all(self, calls: list[Coroutine]) -> concurrent.futures.Future:
        """All at once and in the background: they end only when this rank does its part."""

        async def together() -> None:
            await asyncio.gather(*calls)

        return self._pool.submit(run, together())

    def finish(self) -> LiveReport:
        failures = {t.url: self._failure for t in self._targets} if self._failure is not None else {}
        return LiveReport(self._num_tensors, self._nbytes, failures)

    def close(self) -> None:
        self._leave()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _group_beside_the_default(
    store: dist.Store, world_size: int, backend: str, name: str, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Rank 0 of a group whose other ranks are in other programs.

    `new_group` only splits the default group, so this takes the step below it, as SGLang does on its side; names and
    prefixes must be those it uses.
    """
    # Private parts of torch, checked on 2.11 and 2.13; imported here so that no other transport depends on them.
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size, 0, [], Backend(backend), PrefixStore(name, store), group_name=name, timeout=timeout
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


DISTRIBUTED = LiveTransport(
    name="distributed",
    choice="distributed",
    engine_needs="distributed",
    make_sender=DistributedSender,
    # Two ranks of one NCCL group cannot share a device.
    suits=lambda site: not (site.cuda and site.colocated),
    every_rank=False,
)
