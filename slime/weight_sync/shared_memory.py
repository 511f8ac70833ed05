"""Weights through shared memory, for engines on the trainer's machine: buckets with a checksum each."""

from __future__ import annotations

from slime.utils.machine import shm
from slime.weight_sync.base import NamedTensors, Parcel, SenderOptions, Transport
from slime.wire.control import EngineControl, Receipt
from slime.wire.manifest import BucketManifest, WeightManifest, fill_bucket, plan_bucket
from slime.wire.protocol import EngineInfo


class SharedMemorySender:
    """Two sets of segments take turns: one holds the version that engines serve, the other takes the next."""

    transport = "shared_memory"

    def __init__(self, options: SenderOptions):
        # A mark of its own: a sender that takes the place of another knows what that one left.
        self._prefix = f"{options.shm_prefix}-weights"
        self._left = shm.list_segments(self._prefix)  # engines may need them until we have sent once
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
        if position < len(held) and held[position].nbytes >= nbytes:
            return held[position]
        for stale in held[position:]:
            stale.unlink()
        del held[position:]
        held.append(shm.create_segment(nbytes, self._prefix))
        return held[position]

    def finish(self, version: str) -> Parcel:
        buckets, self._buckets = tuple(self._buckets), []
        self._turn = 1 - self._turn
        num_tensors, nbytes = sum(len(b.tensors) for b in buckets), sum(b.nbytes for b in buckets)
        manifest = WeightManifest(version, buckets, num_tensors, nbytes)
        return Parcel(version, self.transport, num_tensors, nbytes, manifest.checksum, manifest)

    def close(self) -> None:
        for segment in (segment for held in self._sets for segment in held):
            segment.close()
            segment.unlink()
        self._sets = [[], []]


async def deliver(parcel: Parcel, control: EngineControl, info: EngineInfo) -> Receipt:
    return await control.update_from_shared_memory(parcel.payload)


async def compare(parcel: Parcel, control: EngineControl, info: EngineInfo, shm_prefix: str) -> list[str]:
    return await control.check_equal(parcel.payload)


SHARED_MEMORY = Transport(SharedMemorySender, deliver, compare)
