"""What a trainer rank reports for the record of one step: its spans and the advantages it used."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from statistics import fmean

from slime.backends.base import Layout
from slime.observability.tracer import TRAINER, Span, spans_of_waits
from slime.record.additions import Advantage
from slime.step.training_step import TrainingStep

_MAX_TOKENS = 200_000  # of a step whose advantages are kept token by token


@dataclass(frozen=True, slots=True)
class RankNotes:
    """Example: RankNotes([Span(3, "trainer-0", "train", 10.0, 12.0)], [Advantage(25, 0.7)])."""

    spans: list[Span] = field(default_factory=list)
    advantages: list[Advantage] = field(default_factory=list)


def notes_of(step: TrainingStep, rank: int, layout: Layout) -> RankNotes:
    """Collect them. Of the ranks that share samples, one reports the advantages."""
    spans = step.tracer.drain(lane=TRAINER.format(rank=rank)) + spans_of_waits(step.rollout_id)
    tells = layout.tp_rank == layout.cp_rank == layout.pp_rank == 0
    return RankNotes(spans, _advantages(step) if tells else [])


def _advantages(step: TrainingStep) -> list[Advantage]:
    batch = step.batch
    lists, indices = batch.get("advantages"), batch.get("sample_indices")
    if not lists or not indices:
        return []
    by_token = sum(len(values) for values in lists) <= _MAX_TOKENS
    found = []
    for index, row, mask in zip(indices, lists, batch["loss_masks"], strict=True):
        values = row.tolist()  # in Python: a few numbers each, of hundreds of samples
        trained = list(compress(values, mask.tolist())) if len(mask) == len(values) else values
        if index is None or not trained:
            continue
        low, high = min(trained), max(trained)
        mean = low if high == low else fmean(trained)
        found.append(Advantage(int(index), mean, values if by_token and high - low > 1e-6 else None))
    return found
