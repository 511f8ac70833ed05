"""The copy that follows a live push, for engines that come late: kept in host memory, written to disk when one asks."""

from __future__ import annotations

import concurrent.futures
import threading

import torch

from slime.weight_sync.base import NamedTensors, Parcel, SenderOptions
from slime.weight_sync.disk import DISK, DiskSender, wanted_mark
from slime.wire.manifest import TensorEntry, plan_bucket

_LOOK_S = 0.05


class LateCopySender(DiskSender):
    """The parcel is out before its folder is there; who needs it asks for it and waits.

    Most versions are never asked for, so most are never written. One that was asked for stays until the version after
    the next is written. Nobody can ask for a version after the next one was sent: engines do not join during a push.
    """

    def __init__(self, options: SenderOptions):
        super().__init__(options)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="late-copy")
        self._buffers: list[torch.Tensor] = []  # one per bucket, used again by every push
        self._entries: list[tuple[TensorEntry, ...]] = []  # of the version on its way
        self._writing: concurrent.futures.Future | None = None
        self._superseded = threading.Event()

    def send(self, bucket: NamedTensors) -> None:
        if not self._entries:
            self._end_writing()  # the buffers are about to change
        entries, nbytes = plan_bucket(bucket)
        buffer = self._buffer(len(self._entries), nbytes, pinned=bucket[0][1].is_cuda)
        for entry, (_, tensor) in zip(entries, bucket, strict=True):
            entry.view(buffer).copy_(tensor, non_blocking=True)
        self._entries.append(entries)

    def _buffer(self, position: int, nbytes: int, *, pinned: bool) -> torch.Tensor:
        if position < len(self._buffers) and self._buffers[position].numel() >= nbytes:
            return self._buffers[position]
        # Pinned, or the copy from the device would take ten times as long.
        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._buffers[position : position + 1] = [buffer]
        return buffer

    def finish(self, version: str) -> Parcel:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        entries, self._entries = self._entries, []
        self._superseded = threading.Event()
        self._writing = self._pool.submit(self._write_if_wanted, entries, version, self._superseded)
        sizes = [entry.nbytes for bucket in entries for entry in bucket]
        return Parcel(version, DISK.name, len(sizes), sum(sizes), None, self._target(version))

    def _write_if_wanted(
        self, entries: list[tuple[TensorEntry, ...]], version: str, superseded: threading.Event
    ) -> None:
        mark = wanted_mark(self._target(version))
        while not mark.exists():
            if superseded.wait(_LOOK_S):
                return
        for buffer, bucket in zip(self._buffers, entries, strict=False):
            DiskSender.send(self, [(entry.name, entry.view(buffer)) for entry in bucket])
        DiskSender.finish(self, version)
        mark.unlink()

    def _end_writing(self) -> None:
        self._superseded.set()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()  # an error in the background is an error of the next push

    def close(self) -> None:
        self._superseded.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()
