"""Performs weight pushes: numbers the version, lets the ranks send it and the engines load it."""

from __future__ import annotations

import time
from dataclasses import replace

from slime.catalog.transports import TRANSPORTS
from slime.cluster.residency import SYNC, Residency
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.training.rank_sender import RankSender
from slime.cluster.training.train_actor import TrainActor
from slime.cluster.training.train_group import Ranks
from slime.observability.tracer import PUSH, Span, Tracer
from slime.runtime.base import Handle
from slime.utils.errors import WorkerDied
from slime.weight_sync.base import LiveReport, WeightBundle


class WeightPush:
    """Pushes weights to engines. Versions are `run:n`; n starts at 1 and continues after a resume."""

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
        self.transport, self._engine_urls = transport, engine_urls
        self._senders = ranks.part(TrainActor.sender)
        self._run_id, self._dtype, self._live = run_id, dtype, TRANSPORTS[transport].live
        self.num_pushes = done
        self._tracer = Tracer(PUSH)

    def open_senders(self) -> None:
        """Tell the ranks which transport to use, and the addresses of the engines."""
        self._ranks.call(TrainActor.open_sender, self.transport, self._engine_urls)

    def know_engines(self, urls: tuple[str, ...]) -> None:
        """Tell the ranks the addresses of all engines, after one has joined or left."""
        self._engine_urls = urls
        self._senders.call(RankSender.know_engines, urls)

    def drain_spans(self, rollout_id: int) -> list[Span]:
        """Return the spans of pushes since the last call."""
        return self._tracer.drain(rollout_id=rollout_id)

    def note_pushed(self, number: int) -> None:
        """Tell new ranks that engines hold their weights as this version."""
        self._ranks.call(TrainActor.note_version, number)

    def push(self) -> dict[str, float]:
        started = time.monotonic()
        version = f"{self._run_id}:{self.num_pushes + 1}"
        metrics: dict[str, float] = {}
        with self._residency.phase(SYNC):
            if self._live:
                report, metrics = self._send_live(version)
                bundle = self._bundle_after(report, version)
            else:
                bundle = self._export(version)
            with self._tracer.span("engines take it"):
                received = self._engines.call_control(EngineWeights.receive, bundle).result()
        self.num_pushes += 1
        evicted = "perf/engines_evicted"
        return {
            **received,
            **metrics,
            evicted: received.get(evicted, 0) + metrics.get(evicted, 0),
            **bundle.metrics,
            "perf/update_weights_time": time.monotonic() - started,
            "perf/update_weights_bytes": bundle.nbytes,
            "rollout/weight_version": self.num_pushes,
        }

    def _export(self, version: str) -> WeightBundle:
        with self._tracer.span("ranks write a copy"):
            bundle = self._ranks.call(TrainActor.export, version, self._dtype)[0]
        assert bundle is not None, "the first rank makes the bundle"
        return bundle

    def _bundle_after(self, report: LiveReport, version: str) -> WeightBundle:
        """Return what was sent live, with files where an engine needs them; the others generate already."""
        if report.failures or self._engines.call_control(EngineWeights.needs_files).result():
            bundle = self._export(version)
            _check_count(report, bundle)
            return bundle
        self.note_pushed(int(version.rpartition(":")[2]))
        return WeightBundle(version, "disk", report.num_tensors, report.nbytes, None, None)

    def wants_files(self, *, changed: bool) -> bool:
        """Return whether an engine waits for files of the weights; see `EngineWeights.wants_files`."""
        if not self._live:
            return False
        return self._engines.call_control(EngineWeights.wants_files, changed=changed).result()

    def write_files(self, *, changed: bool) -> None:
        """Write the trainer's weights for engines that wait; as a new version if they `changed`."""
        number = self.num_pushes + changed
        with self._residency.with_parameters():
            bundle = self._export(f"{self._run_id}:{number}")
        self._engines.call_control(EngineWeights.add_files, bundle).result()
        self.num_pushes = number

    def _send_live(self, version: str) -> tuple[LiveReport, dict[str, float]]:
        """Pauses the engines, sends the weights and lets them continue; nothing else happens in between."""
        started = time.monotonic()
        with self._tracer.span("engines pause"):
            targets = self._engines.call_control(EngineWeights.begin_live).result()
        try:
            with self._tracer.span("ranks send"):
                sent = self._senders.call(RankSender.send_live, version, self._dtype, targets)
        except WorkerDied:
            self._engines.call_control(EngineWeights.abandon_live, targets).result()
            raise
        reports = [report for report in sent if report is not None]
        # Each sending rank reports the whole model, sent to its own engines or by all stages together.
        failures = {url: why for report in reports for url, why in report.failures.items()}
        sent_bytes = {rank: nbytes for report in reports for rank, nbytes in report.rank_bytes.items()}
        report = replace(reports[0], failures=failures, rank_bytes=sent_bytes)
        with self._tracer.span("engines resume"):
            metrics = self._engines.call_control(EngineWeights.finish_live, version, targets, report).result()
        metrics["perf/update_weights_rank_bytes"] = max(sent_bytes.values(), default=0)
        if not TRANSPORTS[self.transport].every_rank and len(sent_bytes) > 1:
            metrics |= {f"perf/update_weights_rank_bytes/{rank}": n for rank, n in sent_bytes.items()}
        return report, {**metrics, "perf/update_weights_pause_time": time.monotonic() - started}


def _check_count(report: LiveReport, bundle: WeightBundle) -> None:
    """Check that the parts that pipeline stages sent add up to the whole model."""
    assert report.failures or report.num_tensors == bundle.num_tensors, (
        f"the ranks sent {report.num_tensors} tensors of weights {bundle.version}, the model has "
        f"{bundle.num_tensors}"
    )


class PushToNobody:
    """A push without engines, in a replay: ranks count versions as the recorded run did."""

    def __init__(self, ranks: Ranks[TrainActor], done: int = 0):
        self._ranks, self.num_pushes = ranks, done

    def open_senders(self) -> None:
        """Do nothing: there are no engines to send to."""

    def drain_spans(self, rollout_id: int) -> list[Span]:
        return []

    def note_pushed(self, number: int) -> None:
        self._ranks.call(TrainActor.note_push, number)

    def wants_files(self, *, changed: bool) -> bool:
        return False

    def write_files(self, *, changed: bool) -> None:
        """Do nothing: there are no engines to write for."""

    def push(self) -> dict[str, float]:
        self._ranks.call(TrainActor.note_push, self.num_pushes + 1)
        self.num_pushes += 1
        return {}
