"""Records in the background how long each part of the driver's work took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from slime.cluster.recording import Recording
from slime.cluster.training.train_actor import RankNotes
from slime.liveness import phases, waits
from slime.observability.tracer import LOOP, Span, Tracer, spans_of_waits
from slime.runtime.base import Future, Handle, gather
from slime.utils.errors import WorkerDied


class Timeline:
    """The driver's spans. `recording` None: a run without a rollout side, which records nothing."""

    def __init__(self, recording: Handle[Recording] | None):
        self._recording = recording
        self._tracer, self._added = Tracer(LOOP), list[Span]()
        self._ended: tuple[int, list[Span], Sequence[Future[RankNotes]]] | None = None  # not recorded yet
        if recording is not None:
            waits.drain_ended()  # waits of the start are no part of a step

    @contextlib.contextmanager
    def doing(self, name: str, rollout_id: int, **about: Any) -> Iterator[waits.Wait]:
        """Record a part of a step, and list it among the waits in progress."""
        with self.noted(name, rollout_id, **about), phases.doing(name) as wait:
            yield wait

    @contextlib.contextmanager
    def noted(self, name: str, rollout_id: int, **about: Any) -> Iterator[None]:
        """Record a part of a step, and show it on the dashboard as what the run does now."""
        if self._recording is not None:
            self._recording.call_control(Recording.now, name, time.time(), rollout_id)
        with self._tracer.span(name, rollout_id, **about):
            yield

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans of this process that another tracer collected."""
        self._added += spans

    def end_step(self, rollout_id: int, notes: Sequence[Future[RankNotes]]) -> None:
        """Close a step. `notes`: what the trainer ranks will report about it."""
        self.record_step()
        spans, self._added = self._tracer.drain() + self._added + spans_of_waits(rollout_id), []
        self._ended = rollout_id, spans, notes

    def record_step(self) -> None:
        """Hand the last step to the record, with the ranks' notes; called when that delays nobody."""
        if self._ended is None or self._recording is None:
            return
        (rollout_id, spans, asked), self._ended = self._ended, None
        notes: list[RankNotes] = []
        with contextlib.suppress(WorkerDied):  # the next call to that rank restarts it
            notes = gather(asked)
        spans += [span for note in notes for span in note.spans]
        advantages = [advantage for note in notes for advantage in note.advantages]
        histograms = [part for note in notes for part in note.histograms]
        self._recording.call_control(Recording.step, rollout_id, spans, advantages, histograms)
