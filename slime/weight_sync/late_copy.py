"""Keeps a copy of a live push in host memory for engines that start late, and writes it when one asks."""

from __future__ import annotations

import concurrent.futures
import logging
import threading

import torch

from slime.weight_sync.base import NamedTensors, SenderOptions, WeightBundle
from slime.weight_sync.disk import CopyRequest, DiskSender
from slime.wire.manifest import TensorEntry, plan_bucket

logger = logging.getLogger(__name__)

_LOOK_S = 0.05


class LateCopySender(DiskSender):
    """Announces a bundle before its folder is written; an engine that needs it requests it and waits.

    Most versions are never requested, so most are never written. A requested folder stays until the version
    after the next is written. If it cannot be written, the engine that requested it gets the error at once.
    No engine can request a version after the next one was sent: engines do not join during a push.
    """

    def __init__(self, options: SenderOptions):
        super().__init__(options)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="late-copy")
        self._buffers: list[torch.Tensor] = []  # one per bucket, reused by every push
        self._entries: list[tuple[TensorEntry, ...]] = []  # buffers of the version that is being sent
        self._writing: concurrent.futures.Future[None] | None = None
        self._superseded = threading.Event()

    def send(self, bucket: NamedTensors) -> None:
        if not self._entries:
            self._end_writing()  # the buffers change next
        entries, nbytes = plan_bucket(bucket)
        buffer = self._buffer(len(self._entries), nbytes, pinned=bucket[0][1].is_cuda)
        for entry, (_, tensor) in zip(entries, bucket, strict=True):
            entry.view(buffer).copy_(tensor, non_blocking=True)
        self._entries.append(entries)

    def _buffer(self, position: int, nbytes: int, *, pinned: bool) -> torch.Tensor:
        if position < len(self._buffers) and self._buffers[position].numel() >= nbytes:
            return self._buffers[position]
        # Pinned: the copy from the device would otherwise take ten times as long.
        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._buffers[position : position + 1] = [buffer]
        return buffer

    def finish(self, version: str) -> WeightBundle:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        entries, self._entries = self._entries, []
        self._superseded = threading.Event()
        self._writing = self._pool.submit(self._write_on_request, entries, version, self._superseded)
        sizes = [entry.nbytes for bucket in entries for entry in bucket]
        return WeightBundle(version, self.transport, len(sizes), sum(sizes), None, self._target(version))

    def _write_on_request(
        self, entries: list[tuple[TensorEntry, ...]], version: str, superseded: threading.Event
    ) -> None:
        request = CopyRequest(self._target(version))
        while request.is_requested() or not superseded.wait(_LOOK_S):
            if not request.is_requested():
                continue
            try:
                self._index, self._nbytes = {}, 0  # left by a failed attempt
                for buffer, bucket in zip(self._buffers, entries, strict=False):
                    super().send([(entry.name, entry.view(buffer)) for entry in bucket])
                super().finish(version)
                break
            except Exception as error:
                # The error reaches the engine that asked: it is evicted, or the run ends. It may ask again
                # later.
                logger.warning(
                    "Weights %s could not be written for an engine that started late: %s", version, error
                )
                request.refuse(error)
        request.clear()

    def _end_writing(self) -> None:
        self._superseded.set()
        if self._writing is not None:
            self._writing.result()  # not even the refusal could be written

    def close(self) -> None:
        self._superseded.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()
