"""Weights in the body of a request, for SGLang on the trainer's machine, bucket by bucket.

The bundle is that of shared memory, so a restarted engine takes it as any other does. The bytes cross a
socket in base64: fine for small models and CPU machines; with a shared GPU device handles to its memory go
instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

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
    """Fills shared memory; the rollout side reads it and sends it on."""

    transport = "http_tensor"


async def deliver(bundle: WeightBundle, control: EngineControl, info: EngineInfo) -> Receipt:
    """The engine must be paused."""
    async with update_session(control, info):
        for bucket in bundle.payload.buckets:
            text = await asyncio.to_thread(_read_bucket, bucket)
            await control.update_from_tensors([text] * info.num_ranks, bundle.version)
    return Receipt(await control.version(), None, None, None)


@contextlib.asynccontextmanager
async def update_session(control: EngineControl, info: EngineInfo) -> AsyncIterator[None]:
    """An update between begin and end, where the engine knows them. After an error the engine is evicted."""
    if info.has_begin_end:
        await control.begin_update()
    yield
    if info.has_begin_end:
        await control.end_update()


def _read_bucket(bucket: BucketManifest) -> str:
    segment = shm.open_segment(bucket.segment)
    try:
        flat = segment.buffer[: bucket.nbytes]
        if byte_checksum(flat) != bucket.checksum:
            raise RuntimeError(
                f"shared segment {bucket.segment} is not what the trainer wrote: checksum differs"
            )
        # A clone: a view would be pickled with the whole segment behind it.
        return pack_bucket(flat.clone(), bucket.tensors)
    finally:
        segment.close()


async def compare(
    bundle: WeightBundle, control: EngineControl, info: EngineInfo, shm_prefix: str
) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="slime-compare-") as folder:
        for i, bucket in enumerate(bundle.payload.buckets):
            segment = shm.open_segment(bucket.segment)
            tensors = {entry.name: entry.view(segment.buffer).clone() for entry in bucket.tensors}
            write_tensors(Path(folder) / f"model-{i + 1:05d}.safetensors", tensors)
            segment.close()
        return await reload_and_compare(control, Path(folder), bundle.version)


HTTP_TENSOR = Transport(HttpTensorSender, deliver, compare)
