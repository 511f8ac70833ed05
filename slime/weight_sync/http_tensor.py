"""Sends weights in request bodies, for SGLang on the trainer's machine, bucket by bucket.

The bundle is in shared memory, so a restarted engine can load it like any other. The bytes are sent over a
socket in base64, which suits small models and CPU machines; engines on the trainer's GPU get memory handles.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import torch

from slime.utils.files.safetensors_files import write_tensors
from slime.utils.machine import shm
from slime.weight_sync.base import Transport, WeightBundle
from slime.weight_sync.sglang_format import pack_bucket
from slime.weight_sync.shared_memory import SharedMemorySender
from slime.weight_sync.verify import reload_and_compare
from slime.wire.control import EngineControl, Receipt
from slime.wire.manifest import BucketManifest, byte_checksum
from slime.wire.protocol import EngineInfo


class HttpTensorSender(SharedMemorySender):
    """Writes the bundle to shared memory; the rollout side reads it and sends it to the engines."""

    transport = "http_tensor"


async def deliver(bundle: WeightBundle, control: EngineControl, info: EngineInfo) -> Receipt:
    """The engine must be paused."""
    if info.dialect.has_begin_end:
        await control.begin_update()
    for bucket in bundle.payload.buckets:
        text = await asyncio.to_thread(_pack, bucket)
        await control.update_from_tensors([text] * info.num_ranks, bundle.version)
    if info.dialect.has_begin_end:  # after an error the engine is evicted
        await control.end_update()
    return Receipt(await control.version(), None, None, None)


def _pack(bucket: BucketManifest) -> str:
    return pack_bucket(read_bucket(bucket), bucket.tensors)


def read_bucket(bucket: BucketManifest) -> torch.Tensor:
    """Copy a bucket out of shared memory; RuntimeError: its bytes are not what the trainer wrote."""
    segment = shm.open_segment(bucket.segment)
    try:
        flat = segment.buffer[: bucket.nbytes].clone()
    finally:
        segment.close()
    if byte_checksum(flat) != bucket.checksum:
        raise RuntimeError(f"shared segment {bucket.segment} is not what the trainer wrote: checksum differs")
    return flat


async def compare(
    bundle: WeightBundle, control: EngineControl, info: EngineInfo, shm_prefix: str
) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="slime-compare-") as folder:
        for i, bucket in enumerate(bundle.payload.buckets):
            flat = read_bucket(bucket)
            tensors = {entry.name: entry.view(flat).clone() for entry in bucket.tensors}
            write_tensors(Path(folder) / f"model-{i + 1:05d}.safetensors", tensors)
        return await reload_and_compare(control, Path(folder), bundle.version)


HTTP_TENSOR = Transport(HttpTensorSender, deliver, compare)
