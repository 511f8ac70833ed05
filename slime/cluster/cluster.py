"""The run as the loop sees it: makes rollouts, trains on them, pushes weights, evaluates, saves, logs."""

from __future__ import annotations

from dataclasses import dataclass

from slime.arguments import Args
from slime.cluster.checkpoints.run_ledger import was_evaluated
from slime.cluster.driver_spans import Timeline
from slime.cluster.rollout_manager import Generated, RolloutManager
from slime.cluster.rollout_schedule import RolloutSchedule
from slime.cluster.run_log import RunLog
from slime.cluster.run_requests import Requests
from slime.cluster.trainer import Trainer
from slime.runtime.base import Future, Handle, Ready
from slime.utils.machine.run_identity import Run
from slime.utils.types import RolloutBatch


@dataclass(kw_only=True)
class Cluster:
    """A run whose parts are all ready; `slime.cluster.start.open_cluster` starts it and closes it."""

    args: Args
    run: Run
    schedule: RolloutSchedule
    rollout: Handle[RolloutManager]
    trainer: Trainer
    log: RunLog
    timeline: Timeline
    requests: Requests
    restored: dict[int, Generated]  # rollouts that were complete before a resume, by number
    stopped: str | None = None  # why the loop ended early, on request

    def generate(self, rollout_id: int) -> Generated:
        with self.trainer.make_room(rollout_id):
            return self.collect(rollout_id, self.begin_generate(rollout_id))

    def begin_generate(self, rollout_id: int) -> Future[Generated]:
        restored = self.restored.pop(rollout_id, None)
        if restored is not None:
            return Ready(restored)
        return self.trainer.guard(self.rollout.call(RolloutManager.generate, rollout_id), rollout_id)

    def collect(self, rollout_id: int, future: Future[Generated]) -> Generated:
        with self.timeline.doing("generating", rollout_id) as wait:
            self.timeline.tell_step()
            generated = future.result()
        self.log.log_rollout(rollout_id, generated, wait.age_s)
        return generated

    def train(self, rollout_id: int, batch: RolloutBatch | None) -> None:
        self.requests.before_training(self, rollout_id)
        report = self.trainer.train(rollout_id, batch)
        self.rollout.call_control(RolloutManager.note_trained, rollout_id)
        is_saved = self.args.save is not None and self.schedule.save_after(rollout_id)
        if metrics := self.trainer.keep_state(rollout_id, is_saved=is_saved):
            self.log.log(metrics, "rollout", rollout_id)
        peaks = self.trainer.residency.drain_peaks()
        self.log.log_step(rollout_id, report, peaks)
        if self.log.prediction_is_due:
            held = self.trainer.peak_bytes(peaks.get("perf/peak_memory_train_gib"))
            self.log.log_prediction(held, batch)

    def push_weights(self, rollout_id: int) -> None:
        """Push the weights that rollout `rollout_id` and later ones use; no-op if nothing is trained."""
        if self.trainer.weight_push is None:
            return
        metrics = self.trainer.push_weights(max(rollout_id - 1, 0), first=rollout_id == self.schedule.start)
        if metrics:
            self.log.log(metrics, "rollout", rollout_id)
        if rollout_id < self.schedule.num_rollout:
            self.trainer.leave(rollout_id)

    def evaluate(self, rollout_id: int) -> None:
        with self.trainer.make_room(rollout_id), self.timeline.doing("evaluating", rollout_id):
            evaluation = self.rollout.call(RolloutManager.evaluate, rollout_id)
            metrics = self.trainer.guard(evaluation, rollout_id).result()
        self.log.log_evaluation(rollout_id, metrics, [dataset.name for dataset in self.args.eval_datasets])
        # Only now: a run killed before its metrics were logged must evaluate again when it resumes.
        self.rollout.call_control(RolloutManager.note_evaluated, rollout_id)

    def evaluate_what_was_missed(self) -> None:
        """Evaluate after the checkpoint's step, where the run was killed between the two."""
        last = self.schedule.start - 1
        if self.run.num_starts == 1 or last < 0 or not self.schedule.eval_after(last):
            return
        if not was_evaluated(self.run, last):
            self.evaluate(last)

    def save(self, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None = None) -> None:
        """Save after `rollout` was trained; a next rollout in flight is part of the checkpoint."""
        seconds = self.trainer.save(rollout_id, rollout, in_flight)
        self.log.log({"perf/save_model_time": seconds}, "rollout", rollout_id)

    def end_step(
        self, rollout_id: int, rollout: Generated, in_flight: Future[Generated] | None = None
    ) -> bool:
        """Handle requests that came during the step. True: the run is to end here."""
        self.stopped = self.requests.handle(self, rollout_id, rollout, in_flight)
        self.timeline.end_step(rollout_id, self.trainer.begin_notes())
        if self.stopped is not None or not self.schedule.has_next(rollout_id):
            self.timeline.tell_step()
        return self.stopped is not None
