"""Sends weights through shared memory to engines on the trainer's machine, in buckets with checksums."""

from __future__ import annotations

from slime.utils.machine import shm
from slime.weight_sync.base import NamedTensors, SenderOptions, Transport, WeightBundle
from slime.wire.control import EngineControl, Receipt
from slime.wire.manifest import BucketManifest, WeightManifest, fill_bucket, plan_bucket
from slime.wire.protocol import EngineInfo


class SharedMemorySender:
    """Alternates two sets of segments: one holds the version that engines serve, the other gets the next."""

    transport = "shared_memory"

    def __init__(self, options: SenderOptions):
        # A prefix of its own: a sender that replaces another can find the segments that were left.
        self._prefix = f"{options.shm_prefix}-weights"
        self._left = shm.list_segments(self._prefix)  # engines may need them until our first push
        self._sets: list[list[shm.Segment]] = [[], []]
        self._turn = 0
        self._buckets: list[BucketManifest] = []

    def send(self, bucket: NamedTensors) -> None:
        if self._turn and self._left:
            for name in self._left:
                (shm.FOLDER / name).unlink(missing_ok=True)
            self._left = []
        _, nbytes = plan_bucket(bucket)
        segment = self._segment(len(self._buckets), nbytes)
        self._buckets.append(fill_bucket(segment.name, segment.buffer, bucket))

    def _segment(self, position: int, nbytes: int) -> shm.Segment:
        held = self._sets[self._turn]
        if position < len(held) and held[position].nbytes >= nbytes and held[position].is_published():
            return held[position]
        for stale in held[position:]:
            stale.unlink()
        del held[position:]
        held.append(shm.create_segment(nbytes, self._prefix))
        return held[position]

    def finish(self, version: str) -> WeightBundle:
        buckets, self._buckets = tuple(self._buckets), []
        self._turn = 1 - self._turn
        num_tensors, nbytes = sum(len(b.tensors) for b in buckets), sum(b.nbytes for b in buckets)
        manifest = WeightManifest(version, buckets, num_tensors, nbytes)
        return WeightBundle(version, self.transport, num_tensors, nbytes, manifest.checksum, manifest)

    def close(self) -> None:
        for segment in (*self._sets[0], *self._sets[1]):
            segment.close()
            segment.unlink()
        self._sets = [[], []]


async def deliver(bundle: WeightBundle, control: EngineControl, info: EngineInfo) -> Receipt:
    return await control.update_from_shared_memory(bundle.payload)


async def compare(
    bundle: WeightBundle, control: EngineControl, info: EngineInfo, shm_prefix: str
) -> list[str]:
    return await control.check_equal(bundle.payload)


SHARED_MEMORY = Transport(SharedMemorySender, deliver, compare)
