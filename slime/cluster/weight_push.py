"""The one owner of a weight push: numbers the version, has the ranks send it and the engines take it."""

from __future__ import annotations

import time
from typing import Protocol

from slime.cluster.residency import SYNC, Residency
from slime.weight_sync import LiveReport, Parcel, Target


class Sending(Protocol):
    """The training stage, as far as a push is concerned."""

    def export(self, version: str, dtype: str | None) -> Parcel: ...

    def send_live(self, version: str, dtype: str | None, targets: tuple[Target, ...]) -> LiveReport: ...

    def note_push(self, number: int) -> None: ...


class Receiving(Protocol):
    """The rollout stage, as far as a push is concerned."""

    def receive(self, parcel: Parcel) -> dict[str, float]: ...

    def begin_live(self) -> tuple[Target, ...]: ...

    def finish_live(
        self, version: str, targets: tuple[Target, ...], report: LiveReport
    ) -> dict[str, float]: ...


class WeightPush:
    """Versions are `run:n`, n counting from 1 and going on where a checkpoint left off."""

    def __init__(
        self,
        trainer: Sending,
        rollout: Receiving,
        residency: Residency,
        run_id: str,
        dtype: str | None,
        done: int = 0,
        *,
        live: bool = False,
    ):
        self._trainer, self._rollout, self._residency = trainer, rollout, residency
        self._run_id, self._dtype, self._live = run_id, dtype, live
        self.num_pushes = done

    def push(self) -> dict[str, float]:
        started = time.monotonic()
        version = f"{self._run_id}:{self.num_pushes + 1}"
        metrics: dict[str, float] = {}
        report: LiveReport | None = None
        with self._residency.phase(SYNC):
            if self._live:
                report, metrics = self._send_live(version)
            # After a live push this is the copy for engines that come late; the others go on meanwhile.
            parcel = self._trainer.export(version, self._dtype)
            if report is not None:
                _check_count(report, parcel)
            metrics = {**self._rollout.receive(parcel), **metrics}
        self.num_pushes += 1
        return {
            **metrics,
            **parcel.metrics,
            "perf/update_weights_time": time.monotonic() - started,
            "perf/update_weights_bytes": parcel.nbytes,
            "rollout/weight_version": self.num_pushes,
        }

    def _send_live(self, version: str) -> tuple[LiveReport, dict[str, float]]:
        """From pause to continue: nothing else happens in between."""
        started = time.monotonic()
        targets = self._rollout.begin_live()
        report = self._trainer.send_live(version, self._dtype, targets)
        metrics = self._rollout.finish_live(version, targets, report)
        return report, {**metrics, "perf/update_weights_pause_time": time.monotonic() - started}


def _check_count(report: LiveReport, parcel: Parcel) -> None:
    """Stages that each send their part must come to the model as one rank sees it."""
    assert report.failures or report.num_tensors == parcel.num_tensors, (
        f"the ranks sent {report.num_tensors} tensors of weights {parcel.version}, the model has "
        f"{parcel.num_tensors}"
    )


class PushToNobody:
    """A replay has no engines: the ranks only count versions as the recorded
    run did, so as to know them on the samples.
    """

    def __init__(self, trainer: Sending, done: int = 0):
        self._trainer = trainer
        self.num_pushes = done

    def push(self) -> dict[str, float]:
        self.num_pushes += 1
        self._trainer.note_push(self.num_pushes)
        return {}
