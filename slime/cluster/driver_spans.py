"""Notes what the driver does and for how long, and hands it to the record; nothing waits for that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime.cluster.recording import Recording
from slime.cluster.training.rank_notes import RankNotes
from slime.observability import phases
from slime.record.spans import LOOP, PUSH, Span, spans_of_waits
from slime.runtime.base import Future, Handle, WorkerDied, gather
from slime.utils import waits


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step that is over."""

    rollout_id: int
    spans: list[Span]
    notes: Sequence[Future[RankNotes]]


class Timeline:
    """`recording` None: a run without a rollout side, which records nothing."""

    def __init__(self, recording: Handle[Recording] | None):
        self._recording = recording
        self._spans: list[Span] = []
        self._untold: _Ended | None = None  # the last step
        if recording is not None:
            waits.keep_ended()
            waits.take_ended()  # of the start, which is no part of a step

    @contextlib.contextmanager
    def doing(self, name: str, rollout_id: int, **about: Any) -> Iterator[waits.Wait]:
        """A part of a step, also in the table of what is being done."""
        with self.noted(name, rollout_id, **about), phases.doing(name) as wait:
            yield wait

    @contextlib.contextmanager
    def noted(self, name: str, rollout_id: int, **about: Any) -> Iterator[None]:
        began, started = time.time(), time.monotonic()
        if self._recording is not None:
            self._recording.call_control(Recording.now, name, began, rollout_id)
        try:
            yield
        finally:
            self._spans.append(Span(rollout_id, LOOP, name, began, began + time.monotonic() - started, about))

    def pushed(self, rollout_id: int, parts: Iterable[tuple[str, float, float]]) -> None:
        """The parts of a weight push: name, start and end."""
        self._spans += [Span(rollout_id, PUSH, *part) for part in parts]

    def end_step(self, rollout_id: int, notes: Sequence[Future[RankNotes]]) -> None:
        """`notes`: what the trainer's ranks will tell of it."""
        self.tell_step()
        spans, self._spans = self._spans + spans_of_waits(rollout_id), []
        self._untold = _Ended(rollout_id, spans, notes)

    def tell_step(self) -> None:
        """Hands the last step to the record, with what ranks tell of it; called when that delays nobody."""
        ended, self._untold = self._untold, None
        if ended is None or self._recording is None:
            return
        try:
            notes = gather(ended.notes)
        except WorkerDied:  # who needs that rank next restarts it; the record has the step without its notes
            notes = []
        spans = ended.spans + [span for told in notes for span in told.spans]
        advantages = [advantage for told in notes for advantage in told.advantages]
        self._recording.call_control(Recording.step, ended.rollout_id, spans, advantages)
