"""Sends weights as handles to GPU memory, for SGLang engines on the trainer's devices; no copy to the host.

A bucket is gathered into one flat buffer on the device; the engine maps it, copies its weights out and
responds. Two buffers alternate, so that the next bucket is gathered meanwhile. An engine with several GPUs
gets one request with a handle for each of its ranks, made by the trainer rank on the same GPU: the first of
these ranks sends the request, and forwards the reply before the others write to that buffer again.
"""

from __future__ import annotations

import concurrent.futures
import datetime

import torch
import torch.distributed as dist

from slime.utils.async_utils import run
from slime.utils.machine.accelerator import gpu
from slime.weight_sync.base import LiveReport, NamedTensors, SenderOptions, Target
from slime.weight_sync.sglang_format import pack_bucket
from slime.wire.control import EngineControl
from slime.wire.manifest import TensorEntry, plan_bucket

_NUM_BUFFERS = 2


class CudaIpcSender:
    """One per trainer rank; sends to the engine on this rank's device. All ranks call it in step."""

    def __init__(self, options: SenderOptions):
        self._rank, self._deadline_s = options.rank, options.deadline_s
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="weight-send")
        self._buffers: list[torch.Tensor | None] = [None] * _NUM_BUFFERS
        self._pending: list[concurrent.futures.Future[None] | None] = [None] * _NUM_BUFFERS
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # ranks that serve one engine together
        self.failures: dict[str, str] = {}

    def open(self, version: str, targets: tuple[Target, ...]) -> None:
        self._version = version
        timeout = datetime.timedelta(seconds=self._deadline_s)
        for ids in (target.gpu_ids for target in targets):
            if len(ids) > 1 and ids not in self._groups:
                # All ranks must create the group, members or not. It carries text, so it is on the host.
                self._groups[ids] = dist.new_group(list(ids), backend="gloo", timeout=timeout)
        self._targets = [target for target in targets if self._rank in target.gpu_ids]
        self.failures = {}
        self._turn = self._num_tensors = self._nbytes = 0

    def send(self, bucket: NamedTensors) -> None:
        entries, nbytes = plan_bucket(bucket)
        self._num_tensors += len(entries)
        self._nbytes += nbytes
        if not self._targets:
            return
        slot = self._turn % _NUM_BUFFERS
        if self._turn >= _NUM_BUFFERS:
            self._wait(slot)  # the engine has copied the content of this buffer
        self._turn += 1
        flat = self._buffer(slot, nbytes, bucket[0][1].device)
        for entry, (_, tensor) in zip(entries, bucket, strict=True):
            entry.view(flat).copy_(tensor)
        if flat.is_cuda:
            gpu.current_stream().synchronize()  # the engine reads on its own stream
        gathered = [(target, self._gather(target, flat, entries)) for target in self._targets]
        posts = [(target, texts) for target, texts in gathered if texts is not None]
        if posts:
            self._pending[slot] = self._pool.submit(self._post, posts)

    def _gather(
        self, target: Target, flat: torch.Tensor, entries: tuple[TensorEntry, ...]
    ) -> list[str] | None:
        """Return one text per rank of the engine, in their order; None: another trainer rank sends them."""
        place = target.gpu_ids.index(self._rank)
        text = pack_bucket(flat, entries, reader_device=place)
        if len(target.gpu_ids) == 1:
            return [text]
        texts: list[str] | None = [""] * len(target.gpu_ids) if place == 0 else None
        dist.gather_object(text, texts, dst=target.gpu_ids[0], group=self._groups[target.gpu_ids])
        return texts

    def _buffer(self, slot: int, nbytes: int, device: torch.device) -> torch.Tensor:
        held = self._buffers[slot]
        if held is None or held.numel() < nbytes:
            held = self._buffers[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return held

    def _post(self, posts: list[tuple[Target, list[str]]]) -> None:
        for target, texts in posts:
            if target.url not in self.failures:
                control = EngineControl(target.url, self._deadline_s)
                try:
                    run(control.update_from_tensors(texts, self._version))
                except Exception as error:  # the engine loads the copy on disk, or is evicted
                    self.failures[target.url] = f"{type(error).__name__}: {error}"

    def _wait(self, slot: int) -> None:
        """Wait until the engines have replied or failed, whichever rank sent the requests."""
        pending, self._pending[slot] = self._pending[slot], None
        if pending is not None:
            pending.result()
        for target in self._targets:
            if len(target.gpu_ids) > 1:
                dist.barrier(self._groups[target.gpu_ids])

    def finish(self) -> LiveReport:
        for slot in range(min(self._turn, _NUM_BUFFERS)):
            self._wait(slot)
        # The engine's cache needs the memory next.
        self._buffers = [None] * _NUM_BUFFERS
        if gpu.is_available():
            gpu.ipc_collect()
            gpu.empty_cache()
        return LiveReport(self._num_tensors, self._nbytes, self.failures, {self._rank: self._nbytes})

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
