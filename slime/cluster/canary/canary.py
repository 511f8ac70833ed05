"""The canary: compares log-probs of fixed texts from trainer and engines, and reports differences.

It draws no random number, records no sample and changes no state: a run ends the same with and without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from slime.arguments import Args
from slime.cluster.canary.probe import LogProbs, Reading, batch_of, compare, diagnose
from slime.cluster.residency import GENERATE, SYNC, Residency
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.training.train_group import TrainGroup
from slime.liveness import waits
from slime.runtime.base import Handle

logger = logging.getLogger(__name__)

_SHOWN_TENSORS = 8
_PATIENCE_S, _LOOK_S = 60.0, 0.2  # for an engine that serves
_REPEAT = 10  # breaches after which the error is logged again


class Canary:
    """Compares engines with the trainer after pushes. `probe`: token ids of texts; `interval`: in pushes."""

    def __init__(
        self,
        args: Args,
        trainer: TrainGroup,
        engines: Handle[EngineWeights],
        residency: Residency,
        probe: Sequence[Sequence[int]],
    ):
        self._trainer, self._engines, self._residency = trainer, engines, residency
        self._probe, self._interval = [list(ids) for ids in probe], args.canary_interval
        self._batch = batch_of(probe)
        self._last_good: int | None = None  # the last push after which all agreed
        self._num_breaches = 0
        self._refusal_logged = False
        self._is_due = False  # no engine served when it was asked for

    def after_push(self, number: int) -> dict[str, float]:
        """Return metrics of a comparison, after the first push and at every interval; empty: none was due."""
        if not self._probe or not (self._is_due or number == 1 or number % self._interval == 0):
            return {}
        started = time.monotonic()
        with self._residency.phase(SYNC):
            trainer, tolerance = self._trainer.score(self._batch)
        with self._residency.phase(GENERATE):
            # If all engines died in the push, the canary waits for the next one, as any rollout does.
            with waits.waiting("an engine that serves", owner="the canary", deadline_s=_PATIENCE_S) as wait:
                while not (answers := self._score()) and wait.age_s <= _PATIENCE_S:
                    time.sleep(_LOOK_S)
            self._is_due = not answers  # made up for after the next push
            refused = {name: why for name, why in answers.items() if isinstance(why, str)}
            if refused and not self._refusal_logged:
                self._refusal_logged = True
                text = "Canary: %s did not score the fixed texts after push %d (%s); it is not compared."
                logger.warning(text, next(iter(refused)), number, next(iter(refused.values())))
            engines = {name: found for name, found in answers.items() if not isinstance(found, str)}
            if not engines:
                return {}
            readings = compare(trainer, engines)
            self._judge(readings, tolerance, number)
        worst = max(readings, key=lambda reading: reading.mean)
        return {
            "rollout/canary/mean_abs_diff": worst.mean,
            "rollout/canary/max_abs_diff": max(reading.largest for reading in readings),
            "perf/canary_time": time.monotonic() - started,
        }

    def _score(self) -> dict[str, LogProbs | str]:
        return self._engines.call_control(EngineWeights.score, self._probe).result()

    def _judge(self, readings: list[Reading], tolerance: float, number: int) -> None:
        apart = [reading for reading in readings if not reading.mean <= tolerance]  # a NaN is apart, too
        if not tolerance or not apart:
            if self._num_breaches and tolerance:
                logger.warning("Canary: engines and trainer agree again after push %d.", number)
            self._num_breaches, self._last_good = 0, number
            return
        if self._num_breaches % _REPEAT == 0:
            worst = max(apart, key=lambda reading: reading.mean)
            others_agree = len(apart) < len(readings)
            said = diagnose(worst, tolerance, number, self._last_good, others_agree)
            logger.error("%s%s", said, self._tensors_apart(worst.engine))
        self._num_breaches += 1

    def _tensors_apart(self, engine: str) -> str:
        """Return a sentence about the tensors that differ between an engine and the push."""
        found = self._engines.call_control(EngineWeights.tensors_apart, engine).result()
        if isinstance(found, str):
            return f" Its tensors cannot be compared: {found}."
        if not found:
            return (
                " All of its tensors match what was sent, by their checksums: what is sent is not what "
                "the trainer computes with, or the two compute differently."
            )
        shown = ", ".join(found[:_SHOWN_TENSORS])
        more = f" and {len(found) - _SHOWN_TENSORS} more" if len(found) > _SHOWN_TENSORS else ""
        return f" Tensors that it holds otherwise than they were sent, by their checksums: {shown}{more}."
