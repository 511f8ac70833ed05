"""Weights by handles to GPU memory, for SGLang engines on the trainer's own devices: nothing crosses the host.

A bucket is gathered into one flat buffer on the device; the engine maps it, copies its weights out and answers. Two
buffers take turns, so that the next bucket is gathered meanwhile.
"""

from __future__ import annotations

import concurrent.futures

import torch

from slime.utils.async_utils import run
from slime.weight_sync.base import LiveReport, LiveTransport, NamedTensors, SenderOptions, Target
from slime.weight_sync.sglang_format import pack_bucket
from slime.wire.control import EngineControl
from slime.wire.manifest import plan_bucket

_NUM_BUFFERS = 2


class CudaIpcSender:
    """One per trainer rank; serves the engine on this rank's device."""

    def __init__(self, options: SenderOptions):
        self._rank, self._deadline_s = options.rank, options.deadline_s
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="weight-send")
        self._buffers: list[torch.Tensor | None] = [None] * _NUM_BUFFERS
        self._pending: list[concurrent.futures.Future | None] = [None] * _NUM_BUFFERS

    def open(self, version: str, targets: tuple[Target, ...]) -> None:
        self._version = version
        self._targets = [target for target in targets if self._rank in target.gpu_ids]
        self._failures: dict[str, str] = {}
        self._turn = self._num_tensors = self._nbytes = 0

    def send(self, bucket: NamedTensors) -> None:
        entries, nbytes = plan_bucket(bucket)
        self._num_tensors += len(entries)
        self._nbytes += nbytes
        if not self._targets:
            return
        slot = self._turn % _NUM_BUFFERS
        self._turn += 1
        self._wait(slot)  # the engine has copied what lay in this buffer
        flat = self._buffer(slot, nbytes, bucket[0][1].device)
        for entry, (_, tensor) in zip(entries, bucket, strict=True):
            entry.view(flat).copy_(tensor)
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # the engine reads on a stream of its own
        text = pack_bucket(flat, entries)
        self._pending[slot] = self._pool.submit(self._post, text)

    def _buffer(self, slot: int, nbytes: int, device: torch.device) -> torch.Tensor:
        held = self._buffers[slot]
        if held is None or held.numel() < nbytes:
            held = self._buffers[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return held

    def _post(self, text: str) -> None:
        for target in self._targets:
            if target.url not in self._failures:
                control = EngineControl(target.url, self._deadline_s)
                try:
                    run(control.update_from_tensors([text], self._version))
                except Exception as error:  # the engine gets the copy on disk, or is evicted
                    self._failures[target.url] = f"{type(error).__name__}: {error}"

    def _wait(self, slot: int) -> None:
        pending, self._pending[slot] = self._pending[slot], None
        if pending is not None:
            pending.result()

    def finish(self) -> LiveReport:
        for slot in range(_NUM_BUFFERS):
            self._wait(slot)
        # The engine's cache is about to need the room.
        self._buffers = [None] * _NUM_BUFFERS
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        return LiveReport(self._num_tensors, self._nbytes, self._failures)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


CUDA_IPC = LiveTransport(
    name="cuda_ipc",
    choice="tensor",
    engine_needs="tensor",
    make_sender=CudaIpcSender,
    suits=lambda site: site.cuda and site.colocated and site.gpus_per_engine == 1,
    every_rank=True,
)
