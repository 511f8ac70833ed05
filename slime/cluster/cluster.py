"""The run as the loop sees it: makes rollouts, trains on them, pushes weights, evaluates, saves, logs."""

from __future__ import annotations

import concurrent.futures
import logging
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.arguments import Args
from slime.cluster.release import TrainerRelease
from slime.cluster.requests import Requests
from slime.cluster.residency import GENERATE, TRAIN, Residency
from slime.cluster.rollout_manager import Generated, RolloutManager
from slime.cluster.rollout_schedule import RolloutSchedule
from slime.cluster.run_ledger import was_evaluated
from slime.cluster.saving import Saver
from slime.cluster.timeline import Timeline
from slime.cluster.train_actor import TrainActor
from slime.cluster.train_group import TrainGroup
from slime.cluster.weight_push import PushToNobody, WeightPush
from slime.observability import phases
from slime.observability.advisories import Advisor
from slime.observability.tracking import Tracker
from slime.preflight.run_plan import RunPlan
from slime.runtime.base import Future, Guarded, Handle, Ready
from slime.utils.run_identity import Run
from slime.utils.step_folders import Manifest
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)


@dataclass
class Cluster:
    """A run whose parts all stand; `slime.cluster.start.open_cluster` makes it and takes it down.

    `failure`: gets the error of a process that is lost while nobody waits for it.
    """

    args: Args
    run: Run
    schedule: RolloutSchedule
    rollout: Handle[RolloutManager]
    trainer: TrainGroup
    residency: Residency
    weight_push: WeightPush | PushToNobody | None  # None: nothing trains
    saver: Saver | None  # None: the run keeps no checkpoints
    tracker: Tracker
    advisor: Advisor
    failure: concurrent.futures.Future[None]
    taken_up: dict[int, Generated]  # by rollout: what was in flight at the checkpoint
    timeline: Timeline
    requests: Requests
    release: TrainerRelease | None = None  # --release-train; None: the trainer's processes stay
    plan: RunPlan | None = None  # what a look before the start predicted
    stopped: str | None = None  # why the loop ended early, on request
    _pushes_at_training: int = 0  # what a checkpoint of the trained weights says
    _step_times: list[float] = field(default_factory=list)
    _step_started: float = field(default_factory=time.monotonic)

    def generate(self, rollout_id: int) -> Generated:
        with self.residency.phase(GENERATE):
            return self.collect(rollout_id, self.begin_generate(rollout_id))

    def begin_generate(self, rollout_id: int) -> Future[Generated]:
        """It ends early when a trainer rank is lost, which nobody waits for meanwhile."""
        taken_up = self.taken_up.pop(rollout_id, None)
        if taken_up is not None:
            return Ready(taken_up)
        return Guarded(self.rollout.call(RolloutManager.generate, rollout_id), self.failure)

    def collect(self, rollout_id: int, future: Future[Generated]) -> Generated:
        with self.timeline.doing("generating", rollout_id) as wait:
            generated = future.result()
        waited = {"perf/train_wait_time": wait.age_s}
        _tell("rollout %d: %s", rollout_id, _headline(generated.metrics, _ROLLOUT_HEADLINE))
        counted = {"rollout/num_samples": generated.num_samples}
        self._log({**generated.metrics, **waited, **counted}, "rollout", rollout_id)
        return generated

    def train(self, rollout_id: int, batch: RolloutBatch | None) -> None:
        self.requests.before_training(self, rollout_id)
        with self.residency.phase(TRAIN), self.timeline.doing("training", rollout_id):
            if self.release is not None and self.release.come_back():
                self.requests.tell_again(self)
            report = self.trainer.train(rollout_id, batch)
        self.rollout.call_control(RolloutManager.note_trained, rollout_id)
        self._pushes_at_training = self.weight_push.num_pushes if self.weight_push is not None else 0
        if self.args.record_max_mib:
            self.timeline.add(self.trainer.ranks.call(TrainActor.take_notes))
        if self.saver is not None:
            self.saver.finish(wait=False)
        step_time = time.monotonic() - self._step_started
        self._step_started = time.monotonic()
        self._step_times.append(step_time)
        for i, step in enumerate(report.steps):
            _tell("train   %d: %s", rollout_id, _headline(step, _TRAIN_HEADLINE))
            self._log(step, "train", rollout_id * len(report.steps) + i)
        for hint in report.hints:  # of the ranks, whose own logs nobody watches
            logger.warning("train   %d: %s", rollout_id, hint)
        peaks = self.residency.take_peaks()
        if peaks:
            _tell("memory  %d: %s", rollout_id, _headline(peaks, peaks))
        self._log({**report.metrics, **peaks, "perf/step_time": step_time}, "rollout", rollout_id)
        if len(self._step_times) == _STEPS_MEASURED and self.plan is not None:
            self._tell_prediction(self.plan, peaks.get("perf/peak_memory_train_gib"))

    def _tell_prediction(self, plan: RunPlan, peak_gib: float | None) -> None:
        """Once: what was predicted beside what the first steps took. The first step warms up."""
        resident = self.trainer.ranks.call(TrainActor.resident_bytes) if peak_gib is None else []
        held = max(resident, default=0) if peak_gib is None else peak_gib * 2**30
        logger.info("%s", plan.against(statistics.fmean(self._step_times[1:]), held))

    def push_weights(self, rollout_id: int) -> None:
        """The weights that rollout `rollout_id` and later ones use; no-op in a run that trains nothing."""
        if self.weight_push is None:
            return
        first = rollout_id == self.schedule.start
        doing = phases.starting(phases.FIRST_PUSH) if first else phases.doing("pushing weights")
        with self.timeline.noted("pushing weights", max(rollout_id - 1, 0)), doing:
            metrics = self.weight_push.push()
        if metrics:
            self._log(metrics, "rollout", rollout_id)
        if self.release is not None and rollout_id < self.schedule.num_rollout:
            self.release.leave()

    def evaluate(self, rollout_id: int) -> None:
        with self.residency.phase(GENERATE), self.timeline.doing("evaluating", rollout_id):
            evaluation = self.rollout.call(RolloutManager.evaluate, rollout_id)
            metrics = Guarded(evaluation, self.failure).result()
        scores = [f"eval/{dataset.name}" for dataset in self.args.eval_datasets]
        _tell("eval    %d: %s", rollout_id, _headline(metrics, scores))
        self._log(metrics, "eval", rollout_id)
        # Only now: a run that was killed in between would take the evaluation for made, and miss its metrics.
        self.rollout.call_control(RolloutManager.note_evaluated, rollout_id)

    def evaluate_what_was_missed(self) -> None:
        """The evaluation after the checkpoint's step, where the run was killed between the two."""
        last = self.schedule.start - 1
        if self.run.num_starts == 1 or last < 0 or not self.schedule.eval_after(last):
            return
        if not was_evaluated(self.run, last):
            self.evaluate(last)

    def save(self, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None = None) -> None:
        """A checkpoint after `rollout` was trained; the next one is part of it where it is in flight."""
        assert self.saver is not None, "the schedule saves only with --save"
        manifest = Manifest(rollout_id, self.run.run_id, self._pushes_at_training)
        with self.timeline.doing("saving", rollout_id):
            seconds = self.saver.save(manifest, rollout.cursor, in_flight, wait=not self.args.async_save)
        if self.release is not None:
            self.release.saved(rollout_id)
        self._log({"perf/save_model_time": seconds}, "rollout", rollout_id)

    def end_step(
        self, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None = None
    ) -> bool:
        """Between two steps: does what was asked of the run meanwhile. True: it is to end here."""
        self.stopped = self.requests.take(self, rollout_id, rollout, in_flight)
        self.timeline.end_step(rollout_id)
        return self.stopped is not None

    def _log(self, metrics: dict[str, Any], axis: str, step: int) -> None:
        self.tracker.log(metrics, f"{axis}/step", step)
        for advice in self.advisor.observe(metrics, step):
            logger.warning("advice: %s", advice, extra={"advisory": advice})


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


def _tell(words: str, *values: object) -> None:
    """A line for the log alone: whoever shows a run has its metrics."""
    logger.info(words, *values, extra={"shown_elsewhere": True})


def _headline(metrics: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name.partition('/')[2]} {metrics[name]:.4g}" for name in names if name in metrics)
