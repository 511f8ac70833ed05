"""The one owner of a weight push: numbers the version, has the ranks send it and the engines take it."""

from __future__ import annotations

import time
from typing import Protocol

from slime.cluster.residency import SYNC, Residency
from slime.weight_sync import Parcel


class Sending(Protocol):
    """The training stage, as far as a push is concerned."""

    def export(self, version: str, dtype: str | None) -> Parcel: ...


class Receiving(Protocol):
    """The rollout stage, as far as a push is concerned."""

    def receive(self, parcel: Parcel) -> dict[str, float]: ...


class WeightPush:
    """Versions are `run:n`, n counting from 1 and going on where a checkpoint left off."""

    def __init__(
        self, trainer: Sending, rollout: Receiving, residency: Residency, run_id: str, dtype: str | None, done: int = 0
    ):
        self._trainer, self._rollout, self._residency = trainer, rollout, residency
        self._run_id, self._dtype = run_id, dtype
        self.num_pushes = done

    def push(self) -> dict[str, float]:
        started = time.monotonic()
        version = f"{self._run_id}:{self.num_pushes + 1}"
        with self._residency.phase(SYNC):
            parcel = self._trainer.export(version, self._dtype)
            metrics = self._rollout.receive(parcel)
        self.num_pushes += 1
        return {
            **metrics,
            "perf/update_weights_time": time.monotonic() - started,
            "perf/update_weights_bytes": parcel.nbytes,
            "rollout/weight_version": self.num_pushes,
        }
