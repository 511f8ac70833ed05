"""Pushes only low-rank adapters to engines that hold the model: far fewer bytes than a full push.

The bundle is the adapters in shared memory and their config, both in peft's format. An engine that starts
late has loaded the model from its folder, so the bundle is all it needs. The embedded engine adds the product
to its weights; SGLang computes it separately, for requests that name the adapter.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime.weight_sync.base import NamedTensors, SenderOptions, Transport, WeightBundle
from slime.weight_sync.http_tensor import read_bucket
from slime.weight_sync.sglang_format import pack_bucket
from slime.weight_sync.shared_memory import SharedMemorySender
from slime.wire.control import EngineControl, Receipt
from slime.wire.manifest import BucketManifest, WeightManifest
from slime.wire.protocol import ADAPTER_NAME, EngineInfo


@dataclass(frozen=True, slots=True)
class AdapterPayload:
    """Content of a bundle of adapters: the location of the tensors, and peft's config."""

    manifest: WeightManifest
    config: Mapping[str, Any]


class AdapterSender(SharedMemorySender):
    """Writes adapters and config to shared memory, in one bucket because engines load an adapter whole."""

    transport = "adapter_shared_memory"

    def __init__(self, options: SenderOptions):
        super().__init__(options)
        assert options.adapter_config is not None, "a sender of adapters needs their config"
        self._config = options.adapter_config
        self._tensors: NamedTensors = []

    def send(self, bucket: NamedTensors) -> None:
        # Cloned also on the CPU: the tensors are valid only until the next bucket.
        self._tensors += [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in bucket]

    def finish(self, version: str) -> WeightBundle:
        tensors, self._tensors = self._tensors, []
        super().send(tensors)
        bundle = super().finish(version)
        return replace(bundle, payload=AdapterPayload(bundle.payload, self._config))


class AdapterTensorSender(AdapterSender):
    """Sends adapters to engines that take them in the body of a request."""

    transport = "adapter_tensors"


async def deliver_by_memory(bundle: WeightBundle, control: EngineControl, info: EngineInfo) -> Receipt:
    return await control.load_adapter_from_shared_memory(
        ADAPTER_NAME, bundle.payload.manifest, bundle.payload.config
    )


async def compare_by_memory(
    bundle: WeightBundle, control: EngineControl, info: EngineInfo, shm_prefix: str
) -> list[str]:
    return await control.check_equal(bundle.payload.manifest, adapter=True)


async def deliver_by_tensors(bundle: WeightBundle, control: EngineControl, info: EngineInfo) -> Receipt:
    """Load the adapter into an engine that is paused and has no requests, which would keep the old one. The
    engine verifies every tensor by its checksum before it loads the adapter.
    """
    text, checksums = await asyncio.to_thread(_pack, bundle.payload.manifest.buckets[0])
    if ADAPTER_NAME in await control.adapters():
        await control.unload_adapter(ADAPTER_NAME)
    await control.load_adapter_from_tensors(
        ADAPTER_NAME, [text] * info.num_ranks, bundle.payload.config, checksums
    )
    await control.set_version(bundle.version)
    return Receipt(await control.version(), None, None, None)


async def compare_by_tensors(
    bundle: WeightBundle, control: EngineControl, info: EngineInfo, shm_prefix: str
) -> list[str]:
    """Check that the engine still has the adapter; its tensors were verified when it loaded them."""
    return [] if ADAPTER_NAME in await control.adapters() else [ADAPTER_NAME]


def _pack(bucket: BucketManifest) -> tuple[str, dict[str, str]]:
    """Return the bucket in SGLang's format, and the checksum that SGLang computes for each tensor."""
    flat = read_bucket(bucket)
    raw = {entry.name: flat[entry.offset : entry.offset + entry.nbytes] for entry in bucket.tensors}
    checksums = {name: hashlib.sha256(part.numpy().tobytes()).hexdigest() for name, part in raw.items()}
    return pack_bucket(flat, bucket.tensors), checksums


ADAPTER_SHARED_MEMORY = Transport(AdapterSender, deliver_by_memory, compare_by_memory)
ADAPTER_TENSORS = Transport(AdapterTensorSender, deliver_by_tensors, compare_by_tensors)
