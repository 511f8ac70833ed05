"""Logs steps: metrics for the trackers, one line per step for the log, and advice."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slime.cluster.rollout_manager import Generated
from slime.observability.advisories import Advisor
from slime.observability.tracking import Tracker
from slime.preflight.findings import Prediction
from slime.step.step_report import StepReport
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

_STEPS_MEASURED = 3
_ROLLOUT_HEADLINE = (
    "rollout/raw_reward",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "perf/rollout_time",
)
_TRAIN_HEADLINE = (
    "train/loss",
    "train/critic-value_loss",
    "train/grad_norm",
    "train/entropy_loss",
    "train/train_rollout_logprob_abs_diff",
)


class RunLog:
    """Logs the metrics of a run's steps. `prediction` None: nothing was predicted."""

    def __init__(self, tracker: Tracker, advisor: Advisor, prediction: Prediction | None = None):
        self._tracker, self._advisor = tracker, advisor
        self._prediction = prediction
        self._logged: dict[int, set[str]] = {}  # names of metrics, by rollout that is not trained yet
        self._step_times: list[float] = []
        self._step_started = time.monotonic()

    def log(self, metrics: Mapping[str, Any], axis: str, step: int) -> None:
        """Send metrics to the trackers, and log the advice that follows from them."""
        self._tracker.log(dict(metrics), f"{axis}/step", step)
        for advice in self._advisor.observe(metrics, step):
            logger.warning("advice: %s", advice, extra={"advisory": advice})

    def log_rollout(self, rollout_id: int, generated: Generated, waited_s: float) -> None:
        _log_line("rollout %d: %s", rollout_id, headline_of(generated.metrics, _ROLLOUT_HEADLINE))
        self._logged[rollout_id] = {*generated.metrics}
        driver = {"perf/train_wait_time": waited_s, "rollout/num_samples": generated.num_samples}
        self.log({**generated.metrics, **driver}, "rollout", rollout_id)

    def log_step(self, rollout_id: int, report: StepReport, peaks: Mapping[str, float]) -> None:
        step_time = time.monotonic() - self._step_started
        self._step_started = time.monotonic()
        self._step_times.append(step_time)
        for i, step in enumerate(report.steps):
            _log_line("train   %d: %s", rollout_id, headline_of(step, _TRAIN_HEADLINE))
            self.log(step, "train", rollout_id * len(report.steps) + i)
        for hint in report.hints:  # of the ranks, whose own logs nobody watches
            logger.warning("train   %d: %s", rollout_id, hint)
        if peaks:
            _log_line("memory  %d: %s", rollout_id, headline_of(peaks, peaks))
        logged = self._logged.pop(rollout_id, set())  # when the batch was made: one value for one step
        metrics = {name: value for name, value in report.metrics.items() if name not in logged}
        self.log({**metrics, **peaks, "perf/step_time": step_time}, "rollout", rollout_id)

    def log_evaluation(self, rollout_id: int, metrics: Mapping[str, Any], datasets: Iterable[str]) -> None:
        _log_line("eval    %d: %s", rollout_id, headline_of(metrics, [f"eval/{name}" for name in datasets]))
        self.log(metrics, "eval", rollout_id)

    def compare_prediction(self, trainer_bytes: Callable[[], float], batch: RolloutBatch | None) -> None:
        """Log once how the prediction compares with the first steps; the very first one warms up."""
        if self._prediction is not None and len(self._step_times) == _STEPS_MEASURED:
            lengths = statistics.fmean(batch["response_lengths"]) if batch else None
            seconds = statistics.fmean(self._step_times[1:])
            logger.info("%s", self._prediction.against(seconds, trainer_bytes(), lengths))

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds as part of a step: the run was paused."""
        self._step_started += seconds


def _log_line(text: str, *values: object) -> None:
    """Write a line to the log only: whatever displays the run reads its metrics."""
    logger.info(text, *values, extra={"shown_elsewhere": True})


def headline_of(metrics: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name.partition('/')[2]} {metrics[name]:.4g}" for name in names if name in metrics)
