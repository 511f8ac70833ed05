"""The one owner of a weight push: numbers the version, has the ranks send it and the engines take it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from slime.catalog.transports import TRANSPORTS
from slime.cluster.residency import SYNC, Residency
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.training.rank_sender import RankSender
from slime.cluster.training.train_actor import TrainActor
from slime.cluster.training.train_group import Ranks
from slime.runtime.base import Handle, WorkerDied
from slime.weight_sync import LiveReport, Parcel


class WeightPush:
    """Versions are `run:n`, n counting from 1 and going on where a checkpoint left off."""

    def __init__(
        self,
        ranks: Ranks[TrainActor],
        engines: Handle[EngineWeights],
        residency: Residency,
        run_id: str,
        dtype: str | None,
        done: int = 0,
        *,
        transport: str,
        engine_urls: tuple[str, ...],
    ):
        self._ranks, self._engines, self._residency = ranks, engines, residency
        self._transport, self._engine_urls = transport, engine_urls
        self._senders = ranks.part(TrainActor.sender)
        self._run_id, self._dtype, self._live = run_id, dtype, TRANSPORTS[transport].live
        self.num_pushes = done
        self._parts: list[tuple[str, float, float]] = []  # name, start and end in seconds since 1970
        self.open_senders()

    def open_senders(self) -> None:
        """The ranks learn how weights travel, and to whom."""
        self._ranks.call(TrainActor.open_sender, self._transport, self._engine_urls)

    def take_parts(self) -> list[tuple[str, float, float]]:
        """What took how long since the last call."""
        parts, self._parts = self._parts, []
        return parts

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        began, started = time.time(), time.monotonic()
        yield
        self._parts.append((name, began, began + time.monotonic() - started))

    def push_again(self, number: int) -> None:
        """Ranks that took the place of others learn that engines have their weights as this version."""
        self._ranks.call(TrainActor.note_version, number)

    def push(self) -> dict[str, float]:
        started = time.monotonic()
        version = f"{self._run_id}:{self.num_pushes + 1}"
        metrics: dict[str, float] = {}
        report: LiveReport | None = None
        with self._residency.phase(SYNC):
            if self._live:
                report, metrics = self._send_live(version)
            # After a live push this is the copy for engines that come late; the others go on meanwhile.
            with self._part("ranks write a copy"):
                parcel = self._ranks.call(TrainActor.export, version, self._dtype)[0]
            assert parcel is not None, "the first rank makes the parcel"
            if report is not None:
                _check_count(report, parcel)
            with self._part("engines take it"):
                received = self._engines.call_control(EngineWeights.receive, parcel).result()
        self.num_pushes += 1
        return {
            **received,
            **metrics,
            **parcel.metrics,
            "perf/update_weights_time": time.monotonic() - started,
            "perf/update_weights_bytes": parcel.nbytes,
            "rollout/weight_version": self.num_pushes,
        }

    def _send_live(self, version: str) -> tuple[LiveReport, dict[str, float]]:
        """Pauses the engines, sends the weights and lets them continue; nothing else happens in between."""
        started = time.monotonic()
        with self._part("engines pause"):
            targets = self._engines.call_control(EngineWeights.begin_live).result()
        try:
            with self._part("ranks send"):
                sent = self._senders.call(RankSender.send_live, version, self._dtype, targets)
        except WorkerDied:
            self._engines.call_control(EngineWeights.abandon_live, targets).result()
            raise
        reports = [report for report in sent if report is not None]
        # Each rank that sends tells of the whole model, sent to engines of its own or in turns to all.
        failures = {url: why for report in reports for url, why in report.failures.items()}
        report = LiveReport(reports[0].num_tensors, reports[0].nbytes, failures)
        with self._part("engines go on"):
            metrics = self._engines.call_control(EngineWeights.finish_live, version, targets, report).result()
        return report, {**metrics, "perf/update_weights_pause_time": time.monotonic() - started}


def _check_count(report: LiveReport, parcel: Parcel) -> None:
    """Pipeline stages that each send their part must come to the model as one rank sees it."""
    assert report.failures or report.num_tensors == parcel.num_tensors, (
        f"the ranks sent {report.num_tensors} tensors of weights {parcel.version}, the model has "
        f"{parcel.num_tensors}"
    )


class PushToNobody:
    """A replay has no engines: ranks count versions as the recorded run did, to know them on the samples."""

    def __init__(self, ranks: Ranks[TrainActor], done: int = 0):
        self._ranks, self.num_pushes = ranks, done

    def open_senders(self) -> None:
        """There is nobody to send to."""

    def take_parts(self) -> list[tuple[str, float, float]]:
        return []

    def push_again(self, number: int) -> None:
        self._ranks.call(TrainActor.note_push, number)

    def push(self) -> dict[str, float]:
        self._ranks.call(TrainActor.note_push, self.num_pushes + 1)
        self.num_pushes += 1
        return {}
