"""Notes what the driver does and for how long, and hands it to the record; nothing waits for that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

from slime.cluster.recording import Recording
from slime.cluster.training.rank_notes import RankNotes
from slime.observability import phases
from slime.record.spans import LOOP, PUSH, Span, spans_of_waits
from slime.runtime.base import Handle
from slime.utils import waits


class Timeline:
    """`recording` None: a run without a rollout side, which records nothing."""

    def __init__(self, recording: Handle[Recording] | None):
        self._recording = recording
        self._spans: list[Span] = []
        self._notes: list[RankNotes] = []
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

    def add(self, notes: list[RankNotes]) -> None:
        """What the trainer's ranks tell of a step."""
        self._notes += notes

    def end_step(self, rollout_id: int) -> None:
        spans = self._spans + [span for notes in self._notes for span in notes.spans]
        advantages = [advantage for notes in self._notes for advantage in notes.advantages]
        self._spans, self._notes = [], []
        if self._recording is not None:
            spans += spans_of_waits(rollout_id)
            self._recording.call_control(Recording.step, rollout_id, spans, advantages)
