"""The batches that a restarted trainer trains on again: from the ledger, or else from memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import cast

from slime.utils.files import tensor_pickle
from slime.utils.types import RolloutBatch

_MOST_BYTES = 1 << 30  # in memory


class Batches:
    """`read`: asks the ledger for the batch of a rollout; None: there is no ledger that has them."""

    def __init__(self, read: Callable[[int], RolloutBatch | None] | None, most_bytes: int = _MOST_BYTES):
        self._read, self._most_bytes = read, most_bytes
        self._kept: dict[int, bytes] = {}
        self._num_bytes = 0
        self._gone: int | None = None  # the last that is not kept for want of room: those before are no use

    def keep(self, rollout_id: int, batch: RolloutBatch) -> None:
        """Keeps a batch until the trainer's state after it is safe, or there is no more room."""
        if self._read is not None or rollout_id in self._kept:  # the latter: the step was begun again
            return
        if self._gone is None:
            self._kept[rollout_id] = tensor_pickle.dumps(tensor_pickle.pack_rows(batch))
            self._num_bytes += len(self._kept[rollout_id])
        if self._gone is not None or self._num_bytes > self._most_bytes:
            self._kept, self._num_bytes, self._gone = {}, 0, rollout_id

    def forget(self, up_to: int) -> None:
        """The trainer's state after this rollout is safe."""
        if self._gone is not None and self._gone <= up_to:
            self._gone = None
        self._kept = {rollout_id: data for rollout_id, data in self._kept.items() if rollout_id > up_to}
        self._num_bytes = sum(map(len, self._kept.values()))

    def get(self, rollout_id: int) -> RolloutBatch | None:
        """The batch of a rollout, to train on it again; None where it is not there any more."""
        if self._read is not None:
            return self._read(rollout_id)
        data = self._kept.get(rollout_id)
        return None if data is None else cast(RolloutBatch, tensor_pickle.unpack_rows(pickle.loads(data)))
