"""Broadcasts weights in a process group of one trainer rank and all engine ranks: NCCL, or gloo on CPU.

Each pipeline stage has a sender with its own group, named after the stage; a trainer without a pipeline is
one stage. `stage_turns` orders the buckets of several stages.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime
import logging
import secrets
from collections.abc import Coroutine, Iterator
from typing import Any

import torch

from slime.utils.async_utils import get_loop
from slime.utils.machine import accelerator
from slime.utils.machine.process_groups import BroadcastGroup, open_store, reaching
from slime.weight_sync.base import LiveReport, NamedTensors, SenderOptions, Target
from slime.wire.control import EngineControl
from slime.wire.manifest import DTYPE_NAMES

logger = logging.getLogger(__name__)

_BLAME_S = 1.0  # after a broken broadcast, wait this long for replies that may name the cause
_LEAVE_S = 10.0  # after a broken broadcast: an engine that hangs has used up its deadline


class DistributedSender:
    """Keeps the group from push to push; a new group is created when an engine has joined or left."""

    def __init__(self, options: SenderOptions):
        self._options = options
        self._targets: tuple[Target, ...] = ()
        self._group: BroadcastGroup | None = None
        self._group_name = ""
        self.failures: dict[str, str] = {}

    def open(self, version: str, targets: tuple[Target, ...]) -> None:
        self._version, self._num_tensors, self._nbytes = version, 0, 0
        self.failures = {}
        if targets != self._targets:
            self._leave()
            self._targets = targets

    def send(self, bucket: NamedTensors) -> None:
        self._num_tensors += len(bucket)
        self._nbytes += sum(tensor.nbytes for _, tensor in bucket)
        if self.failures or not self._targets:
            return
        self._errors: dict[str, str] = {}  # engine -> its reply to the current step
        self._unanswered: set[str] = set()  # engines that have not replied to it
        try:
            self._broadcast(bucket, self._group or self._join(bucket[0][1].device))
        except Exception as error:
            self._give_up(error)

    def _broadcast(self, bucket: NamedTensors, group: BroadcastGroup) -> None:
        described = [(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in bucket]
        calls = [c.update_from_group(described, self._group_name, self._version) for c in self._controls()]
        with self._together(calls) as errors:
            tensors = [tensor.contiguous() for _, tensor in bucket]
            group.broadcast(tensors, self._options.deadline_s, lambda: bool(errors))

    def _join(self, device: torch.device) -> BroadcastGroup:
        backend = accelerator.collectives(device)
        timeout = datetime.timedelta(seconds=self._options.deadline_s)
        self._group_name = f"slime-pp_{self._options.stage}-{secrets.token_hex(4)}"
        world_size = 1 + sum(target.num_ranks for target in self._targets)
        store = open_store(self._options.host, world_size, timeout)
        calls, offset = [], 1
        for target, control in zip(self._targets, self._controls(), strict=True):
            place = self._options.host, store.port, offset, world_size, self._group_name, backend
            calls.append(control.join_group(*place))
            offset += target.num_ranks
        with self._together(calls), reaching(self._options.host):
            self._group = BroadcastGroup(store, 0, world_size, backend, self._group_name, timeout)
        logger.info("%s: this rank sends weights to %d ranks of engines", self._group_name, world_size - 1)
        return self._group

    def _give_up(self, error: Exception) -> None:
        """Destroy the group after a member failed; engines load the copy on disk until the next group."""
        own, silent = dict(self._errors), sorted(self._unanswered)  # before others fail without the group
        causes = [f"engine {url}: {why}" for url, why in own.items()] or [f"{type(error).__name__}: {error}"]
        causes += [f"no reply by then from {', '.join(silent)}"] if silent else []  # maybe the cause
        broken = f"the group {self._group_name} broke: {'; '.join(causes)}"
        # Every engine gets all causes, because with NCCL the healthy ones report an error too.
        self.failures = {target.url: broken for target in self._targets}
        logger.warning("The broadcast of weights %s failed: %s", self._version, broken)
        # Ended here first: engines that still wait for the rest of the bucket see the connection close.
        group, self._group = self._group, None
        if group is not None:
            group.end()
            self._request_leave(min(_LEAVE_S, self._options.deadline_s))

    def _leave(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            self._request_leave()
            group.end()

    def _request_leave(self, deadline_s: float | None = None) -> None:
        self._errors = {}
        self._on_all([c.leave_group(self._group_name) for c in self._controls(deadline_s)]).result()
        if self._errors:  # a dead engine has left the group
            logger.info(
                "Some engines failed while they left the group %s: %s", self._group_name, self._errors
            )

    def _controls(self, deadline_s: float | None = None) -> list[EngineControl]:
        return [EngineControl(target.url, deadline_s or self._options.deadline_s) for target in self._targets]

    def _on_all(self, calls: list[Coroutine[Any, Any, None]]) -> concurrent.futures.Future[None]:
        """Send one call per target, in the background: calls end only when this rank does its part."""
        errors, unanswered = self._errors, {target.url for target in self._targets}
        self._unanswered = unanswered

        async def one(url: str, call: Coroutine[Any, Any, None]) -> None:
            try:
                await call
            except Exception as error:  # part of the report, under the engine's name
                errors[url] = f"{type(error).__name__}: {error}"
            unanswered.discard(url)

        async def together() -> None:
            await asyncio.gather(*(one(t.url, call) for t, call in zip(self._targets, calls, strict=True)))

        return asyncio.run_coroutine_threadsafe(together(), get_loop())

    @contextlib.contextmanager
    def _together(self, calls: list[Coroutine[Any, Any, None]]) -> Iterator[dict[str, str]]:
        """Run a step on all engines; this rank does its part inside the block, which gets their errors."""
        replies = self._on_all(calls)
        try:
            yield self._errors
        except RuntimeError:
            concurrent.futures.wait([replies], _BLAME_S)
            raise
        replies.result()  # each call has its deadline
        if self._errors:
            raise RuntimeError(f"{len(self._errors)} of {len(self._targets)} engines failed")

    def finish(self) -> LiveReport:
        return LiveReport(self._num_tensors, self._nbytes, self.failures)

    def close(self) -> None:
        self._leave()
